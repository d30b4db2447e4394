#include "cli/doctor/doctor_command.h"

#include <fmt/format.h>

#include <iostream>
#include <memory>

#include "cli/doctor/advice.h"
#include "cli/doctor/findings.h"
#include "cli/engine_json.h"
#include "cli/environment_json.h"
#include "cli/exit_code.h"
#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Arguments {
  std::vector<std::string> paths{"."};
  bool json = false;
};

Json to_json(const CudaFinding& cuda) {
  Json document = {{"works", cuda.why.empty()},   {"why", cuda.why},
                   {"library", cuda.library},     {"version", cuda.version},
                   {"nvidia_fs", cuda.nvidia_fs}, {"why_not_gds", cuda.why_not_gds},
                   {"devices", Json::array()}};
  for (const auto& [info, link] : cuda.gpus) {
    document["devices"].push_back({{"device", fmt::format("cuda:{}", info.ordinal)},
                                   {"name", info.name},
                                   {"memory_bytes", info.memory_bytes},
                                   {"compute_capability", info.compute_capability},
                                   {"direct_rdma", info.direct_rdma},
                                   {"pci", info.pci},
                                   {"link_speed", link.speed},
                                   {"link_speed_most", link.most_speed},
                                   {"link_width", link.width},
                                   {"link_width_most", link.most_width},
                                   {"numa_node", link.numa_node ? Json(*link.numa_node) : Json()}});
  }
  return document;
}

Json to_json(const Findings& findings, const std::vector<std::string>& advice) {
  Json document = provenance_json(findings.environment);
  document["command"] = "doctor";
  document["schema"] = 1;
  document["usable"] = findings.usable();
  document["has_proc"] = findings.has_proc;
  document["has_sys"] = findings.has_sys;
  document["backends"] = Json::array();
  for (const BackendFinding& backend : findings.backends) {
    document["backends"].push_back({{"backend", to_string(backend.kind)},
                                    {"works", backend.works},
                                    {"why", backend.why},
                                    {"features", backend.features}});
  }
  document["cuda"] = to_json(findings.cuda);
  document["engine"] = findings.config ? config_json(*findings.config) : Json();
  document["paths"] = Json::array();
  for (const PathFinding& path : findings.paths) {
    document["paths"].push_back({{"path", path.path},
                                 {"numa_node", path.numa_node ? Json(*path.numa_node) : Json()},
                                 {"explain", path.explanation ? explanation_json(*path.explanation) : Json()},
                                 {"error", path.error ? error_json(*path.error) : Json()}});
  }
  document["advice"] = advice;
  return document;
}

std::string line(std::string_view name, std::string_view value) {
  return fmt::format("  {:<17} {}\n", name, value);
}

std::string limit(const std::optional<std::uint64_t>& bytes) {
  return bytes ? format_size(*bytes) : "unlimited";
}

constexpr std::string_view kNoProc = "unknown: /proc is not mounted";
constexpr std::string_view kNoSys = "unknown: /sys is not mounted";

std::string memory_of(const os::Environment& environment) {
  return fmt::format("{}, {} available{}", format_bytes(environment.memory_bytes),
                     format_bytes(environment.memory_available_bytes),
                     environment.memory_limit_bytes
                         ? fmt::format(", limited to {}", format_size(*environment.memory_limit_bytes))
                         : "");
}

std::string huge_pages_of(const Findings& findings) {
  if (!findings.has_sys) return std::string(kNoSys);
  const std::string& setting = findings.environment.huge_pages;
  return setting.empty() ? "none in this kernel" : setting;
}

std::string machine(const Findings& findings) {
  const os::Environment& environment = findings.environment;
  std::string text = "machine\n";
  text += line("kernel", environment.kernel);
  text += line("cpu", fmt::format("{}, {} cores", environment.cpu, environment.cores));
  text += line("memory", findings.has_proc ? memory_of(environment) : kNoProc);
  text +=
      line("locked memory", environment.memlock_exempt ? "unlimited for this process (CAP_IPC_LOCK)"
                                                       : fmt::format("up to {} (hard limit {})",
                                                                     limit(environment.memlock_soft_bytes),
                                                                     limit(environment.memlock_hard_bytes)));
  text += line("huge pages", huge_pages_of(findings));
  if (environment.io_uring_disabled)
    text += line("io_uring_disabled", fmt::format("{}", *environment.io_uring_disabled));
  const std::string_view seccomp = environment.seccomp_filter ? "active" : "none";
  text += line("seccomp filter", findings.has_proc ? seccomp : kNoProc);
  text += line("container", environment.container.empty() ? "no sign of one" : environment.container);
  return text;
}

std::string backends(const Findings& findings) {
  std::string text = "backends, best first\n";
  for (const BackendFinding& backend : findings.backends) {
    const std::string features =
        backend.features.empty() ? "" : fmt::format(" ({})", fmt::join(backend.features, ", "));
    text +=
        line(to_string(backend.kind), backend.works ? "works" + features : "not available: " + backend.why);
  }
  if (!findings.config) return text + "no backend works: no I/O is possible\n";
  const EngineConfig& config = *findings.config;
  return text + line("an engine here",
                     fmt::format("{}, {} lane{}, queue depth {}, blocks of {}, up to {} of pinned memory",
                                 to_string(config.backend), config.lanes, config.lanes == 1 ? "" : "s",
                                 config.queue_depth, format_size(config.block_bytes),
                                 format_bytes(config.pinned_budget_bytes)));
}

std::string of_gpu(const GpuFinding& gpu) {
  const auto& [info, link] = gpu;
  std::string text = fmt::format("{}, {}, PCI {}", info.name, format_bytes(info.memory_bytes), info.pci);
  if (link.width != 0) {
    text += fmt::format(", x{} at {} (maximum: x{} at {})", link.width, link.speed, link.most_width,
                        link.most_speed);
  }
  if (link.numa_node) text += fmt::format(", NUMA node {}", *link.numa_node);
  return text + (info.direct_rdma ? ", other devices' DMA reaches its memory" : "");
}

std::string gpus(const CudaFinding& cuda) {
  std::string text = "GPUs\n";
  if (!cuda.why.empty()) return text + line("CUDA", "not available: " + cuda.why);
  text += line("CUDA", fmt::format("driver for {}.{}, {}", cuda.version / 1000, cuda.version % 1000 / 10,
                                   cuda.library));
  for (const GpuFinding& gpu : cuda.gpus) text += line(fmt::format("cuda:{}", gpu.info.ordinal), of_gpu(gpu));
  return text + line("GPUDirect", cuda.why_not_gds.empty()
                                      ? "library and kernel module are installed; see the paths"
                                      : "not used: " + cuda.why_not_gds);
}

std::string of_tuning(const TuningExplanation& tuning) {
  if (tuning.time.empty()) return tuning.why;
  return fmt::format("{}, {} ({}): {}", tuning.settings, tuning.in_effect ? "in effect" : "not in effect",
                     tuning.time, tuning.why);
}

std::string of_path(const PathFinding& path, bool with_gpus) {
  std::string text = path.path + "\n";
  if (path.error) return text + line("error", path.error->message);
  if (!path.explanation) return text;
  const Explanation& explanation = *path.explanation;
  text += line("filesystem", fmt::format("{}, mounted at {}", explanation.filesystem, explanation.mount));
  text += line("device", explanation.device);
  text += line("I/O path",
               fmt::format("{}: {}", explanation.direct ? "direct I/O" : "page cache", explanation.why));
  text += line("alignment", fmt::format("memory {} bytes, offset and length {} bytes",
                                        explanation.memory_alignment, explanation.offset_alignment));
  text += line("saved settings", of_tuning(explanation.tuning));
  if (path.numa_node) text += line("NUMA node", fmt::format("{}", *path.numa_node));
  if (with_gpus) {
    text += line("memory of GPUs",
                 fmt::format("{}: {}", explanation.gpu == "gds" ? "GPUDirect Storage" : "pinned buffers",
                             explanation.gpu_why));
  }
  for (const Refusal& refusal : explanation.refused)
    text += line("refused", fmt::format("{}: {}", refusal.what, refusal.why));
  return text;
}

std::string to_text(const Findings& findings, const std::vector<std::string>& advice) {
  std::string text = machine(findings) + "\n" + backends(findings) + "\n" + gpus(findings.cuda);
  for (const PathFinding& path : findings.paths) text += "\n" + of_path(path, !findings.cuda.gpus.empty());
  text += advice.empty() ? "\nnothing to change\n" : "\nwhat to change\n";
  for (const std::string& each : advice) text += "  - " + each + "\n";
  return text;
}

int run(const Arguments& arguments) {
  const Findings findings = examine(arguments.paths);
  const auto advice = advise(findings);
  std::cout << (arguments.json ? to_json(findings, advice).dump(2) + "\n" : to_text(findings, advice))
            << std::flush;
  return findings.usable() && std::cout ? kExitOk : kExitFailed;
}

}  // namespace

void add_doctor(CLI::App& app, std::function<int()>& chosen) {
  CLI::App* const command =
      app.add_subcommand("doctor", "Report what this machine and its disks can do, and what to change");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("PATH", arguments->paths, "Directories or files to examine (default: .)")
      ->type_name("");
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->callback([arguments, &chosen] { chosen = [arguments] { return run(*arguments); }; });
}

}  // namespace trunkline::cli
