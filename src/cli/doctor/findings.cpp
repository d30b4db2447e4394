#include "cli/doctor/findings.h"

#include <algorithm>
#include <filesystem>
#include <tuple>

#include "device/gds/session.h"

namespace trunkline::cli {
namespace {

BackendFinding try_backend(BackendKind kind) {
  BackendFinding finding{.kind = kind, .works = false, .why = {}, .features = {}};
  const auto engine = Engine::create({.backend = kind,
                                      .lanes = 1,
                                      .queue_depth = {},
                                      .block_bytes = {},
                                      .pinned_budget_bytes = {},
                                      .gpu = GpuPath::automatic,
                                      .faults = {}});
  finding.works = engine.has_value();
  if (engine) {
    finding.features = engine->config().features;
  } else {
    finding.why = engine.error().message;
  }
  return finding;
}

PathFinding try_path(const Result<Engine>& engine, const std::string& path) {
  PathFinding finding{.path = path, .explanation = {}, .location = {}, .error = {}, .numa_node = {}};
  if (auto location = os::locate(path)) {
    finding.numa_node = os::numa_node_of(location->device);
    finding.location = std::move(*location);
  }
  if (!engine) {
    finding.error = engine.error();
    return finding;
  }
  auto explanation = engine->explain(path);
  if (explanation) {
    finding.explanation = std::move(*explanation);
  } else {
    finding.error = explanation.error();
  }
  return finding;
}

CudaFinding look_for_cuda() {
  CudaFinding finding;
  std::error_code ignored;
  finding.nvidia_fs = std::filesystem::exists("/proc/driver/nvidia-fs", ignored);
  finding.why_not_gds = cufile::why_unavailable().value_or("");
  const auto info = cuda_info();
  if (!info) {
    finding.why = info.error().message;
    return finding;
  }
  finding.version = info->version;
  finding.library = info->library;
  // Examining a path for GPUDirect Storage requires that a GPU is in use.
  if (finding.why_not_gds.empty() && !info->devices.empty()) std::ignore = cuda_device(0);
  for (const CudaDeviceInfo& device : info->devices)
    finding.gpus.push_back({.info = device, .link = os::read_pci_link(device.pci)});
  return finding;
}

}  // namespace

bool Findings::usable() const {
  return config.has_value() &&
         std::ranges::none_of(paths, [](const PathFinding& path) { return path.error.has_value(); });
}

Findings examine(const std::vector<std::string>& paths) {
  Findings findings;
  std::error_code ignored;
  findings.has_proc = std::filesystem::exists("/proc/self/status", ignored);
  findings.has_sys = std::filesystem::exists("/sys/kernel", ignored);
  findings.environment = os::read_environment();
  findings.cuda = look_for_cuda();
  for (const BackendKind kind : kKernelBackends) {
    findings.backends.push_back(try_backend(kind));
  }
  const auto engine = Engine::create();
  if (engine) findings.config = engine->config();
  for (const std::string& path : paths) findings.paths.push_back(try_path(engine, path));
  return findings;
}

}  // namespace trunkline::cli
