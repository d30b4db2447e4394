// What the commands of `trunkline checkpoint` share: opening the directory, and output.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "checkpoint/store.h"
#include "cli/checkpoint/checkpoint_actions.h"
#include "trunkline/error.h"

namespace trunkline::cli {

// Opens an existing directory of checkpoints.
Result<std::unique_ptr<checkpoint::Store>> open_store(const CheckpointArguments& arguments);

// The error for a directory that has no checkpoint yet.
Error no_checkpoint(const checkpoint::Store& store);

// The requested step, or the latest; when there is none, an error that names the directory.
Result<std::uint64_t> chosen_step(const checkpoint::Store& store, const CheckpointArguments& arguments);

// The first members of each command's JSON document.
nlohmann::ordered_json document_of(std::string_view command, const CheckpointArguments& arguments);

// Prints the text, or with --json the document; kExitFailed if that fails or `ok` is false.
int print(const CheckpointArguments& arguments, const nlohmann::ordered_json& document,
          const std::string& text, bool ok);

// The share of a checkpoint's bytes that its own save wrote: less than 1 if that was incremental. 1 for an
// empty one.
double written_share(const checkpoint::Manifest& manifest);

// On stderr, as "trunkline checkpoint COMMAND: ...".
void print_problem(std::string_view command, std::string_view message);

// kExitUsage when the checkpoint or directory does not exist, kExitFailed for everything else.
int fail(const CheckpointArguments& arguments, std::string_view command, const Error& error);

// Names in files come from elsewhere: removes control characters, which terminals would obey.
std::string printable(std::string_view text);

}  // namespace trunkline::cli
