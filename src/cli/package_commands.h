// Commands of the Python package. This program lists them; the trunkline that the package installs runs them.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string_view>

namespace trunkline::cli {

// The heading of these commands in the help.
inline constexpr std::string_view kPackageGroup = "Subcommands of the Python package";

struct PackageCommand {
  const char* name;
  const char* description;
};
inline constexpr PackageCommand kPackageCommands[] = {
    {"pack", "Prepare a Hugging Face model for running in less memory than its weights"},
    {"plan", "Predict how many tokens per second a model generates with its weights streamed"},
    {"workload", "Emulate trainings, checkpoints and inferences: how busy storage keeps the accelerators"},
};
inline constexpr PackageCommand kPackageCheckpointCommands[] = {
    {"export", "Write a checkpoint as a .safetensors or .pt file, or as a folder for transformers"},
    {"import", "Save a file or folder of other programs as a step"},
    {"rm", "Remove the checkpoint of one step"},
    {"diff", "Compare two checkpoints or files: which tensors differ, and by how much"},
    {"plan", "Compute how often to save on machines that fail, and what that costs"},
};

// Adds a command that fails with an error that says where it is.
void add_package_command(CLI::App& app, CLI::App& group, std::function<int()>& chosen,
                         const PackageCommand& command);

}  // namespace trunkline::cli
