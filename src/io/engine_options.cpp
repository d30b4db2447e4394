// Resolves the options to what this machine supports.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <thread>

#include "io/engine_core.h"
#include "os/environment.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

struct BackendName {
  BackendKind kind;
  std::string_view name;
};
constexpr std::array<BackendName, 5> kBackendNames = {{
    {BackendKind::automatic, "auto"},
    {BackendKind::io_uring, "io_uring"},
    {BackendKind::libaio, "libaio"},
    {BackendKind::threads, "threads"},
    {BackendKind::memory, "memory"},
}};

struct GpuPathName {
  GpuPath path;
  std::string_view name;
};
constexpr std::array<GpuPathName, 3> kGpuPathNames = {{
    {GpuPath::automatic, "auto"},
    {GpuPath::gds, "gds"},
    {GpuPath::bounce, "bounce"},
}};

Error out_of_range(std::string_view name, std::string_view range, std::uint64_t value) {
  return make_error(ErrorKind::invalid_argument, fmt::format("{}: must be {}, not {}", name, range, value));
}

// Less than a page holds nothing, and more than the machine's memory bounds nothing.
Status check_budget(std::uint64_t bytes) {
  const auto machine = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                       static_cast<std::uint64_t>(::sysconf(_SC_PAGE_SIZE));
  if (bytes != 0 && bytes < 4096)
    return std::unexpected(out_of_range("pinned_budget_bytes", "0 or at least 4096", bytes));
  if (bytes <= machine) return {};
  return std::unexpected(make_error(
      ErrorKind::invalid_argument,
      fmt::format(
          "pinned_budget_bytes: {} is more than the memory of this machine ({}); pass a part of it, such as "
          "{}, the default",
          format_size(bytes), format_bytes(machine), format_bytes(os::usable_memory_bytes() / 4))));
}

}  // namespace

std::string_view to_string(BackendKind kind) {
  return std::ranges::find(kBackendNames, kind, &BackendName::kind)->name;
}

Result<BackendKind> parse_backend(std::string_view name) {
  const auto* found = std::ranges::find(kBackendNames, name, &BackendName::name);
  if (found == kBackendNames.end()) {
    return std::unexpected(make_error(
        ErrorKind::invalid_argument,
        fmt::format(
            "backend: \"{}\" is not one of \"auto\", \"io_uring\", \"libaio\", \"threads\", \"memory\"",
            name)));
  }
  return found->kind;
}

std::string_view to_string(GpuPath path) {
  return std::ranges::find(kGpuPathNames, path, &GpuPathName::path)->name;
}

Result<GpuPath> parse_gpu_path(std::string_view name) {
  const auto* found = std::ranges::find(kGpuPathNames, name, &GpuPathName::name);
  if (found != kGpuPathNames.end()) return found->path;
  return std::unexpected(
      make_error(ErrorKind::invalid_argument,
                 fmt::format("gpu: \"{}\" is not one of \"auto\", \"gds\", \"bounce\"", name)));
}

Result<EngineConfig> io::resolve(const EngineOptions& options) {
  // With two lanes, one can copy or reap while the other waits; more only pay where many cores share the
  // copying.
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  EngineConfig config{
      .backend = options.backend,
      .lanes = options.lanes.value_or(std::clamp(cores / 2, 1U, 4U)),
      .queue_depth = options.queue_depth.value_or(32),
      .block_bytes = options.block_bytes.value_or(4 * kMiB),
      .slot_bytes = 0,
      .pinned_budget_bytes = options.pinned_budget_bytes.value_or(os::usable_memory_bytes() / 4),
      .gpu = options.gpu,
      .features = {}};
  if (config.lanes < 1 || config.lanes > 64)
    return std::unexpected(out_of_range("lanes", "from 1 to 64", config.lanes));
  if (config.queue_depth < 1 || config.queue_depth > 4096)
    return std::unexpected(out_of_range("queue_depth", "from 1 to 4096", config.queue_depth));
  if (config.block_bytes < 4096 || config.block_bytes > kGiB || config.block_bytes % 4096 != 0)
    return std::unexpected(
        out_of_range("block_bytes", "a multiple of 4096 from 4 KiB to 1 GiB", config.block_bytes));
  if (auto sound = check_budget(config.pinned_budget_bytes); !sound) return std::unexpected(sound.error());
  config.slot_bytes = slot_bytes(config.block_bytes);
  return config;
}

}  // namespace trunkline
