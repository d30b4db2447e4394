#include "io/explain.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "device/device.h"
#include "device/gds/session.h"
#include "io/backends/backend.h"
#include "io/engine_core.h"
#include "io/gpu/gds_policy.h"
#include "io/tuned_settings.h"
#include "os/file_pair.h"
#include "os/file_type.h"
#include "os/topology.h"
#include "trunkline/device.h"

namespace trunkline::io {
namespace {

// A file that is unlinked as soon as it is open: shows how a new file in `directory` would behave.
Result<os::FilePair> open_probe(const std::string& directory, os::DirectPolicy policy) {
  std::string path = directory + "/.trunkline-probe-XXXXXX";
  os::UniqueFd fd(::mkostemp(path.data(), O_CLOEXEC));
  if (!fd.valid())
    return std::unexpected(
        system_error(errno, fmt::format("create a probe file in {}", directory), directory));
  ::unlink(path.c_str());
  return os::make_pair_of(std::move(fd), path, O_RDWR, policy);
}

Result<os::FilePair> open_for_probe(const std::string& path, os::DirectPolicy policy) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0)
    return std::unexpected(system_error(errno, fmt::format("determine the I/O path for {}", path), path));
  if (S_ISDIR(status.st_mode)) return open_probe(path, policy);
  return os::open_pair(path, O_RDONLY, policy);
}

// Empty where nothing was tuned.
std::string why_not_tuned(const tuning::TuningTable& tunings, const std::string& path) {
  const tuning::Tuning* const shared = tunings.find_shared(path);
  if (shared == nullptr) return tunings.problem();
  return fmt::format("it was tuned together with others, for volumes of exactly {} ({}: {})",
                     fmt::join(shared->paths, ", "), shared->time, tuning::to_string(shared->settings));
}

void probe_memory_lock(const Buffer& memory, std::vector<Refusal>& refused) {
  if (memory.locked() || ::mlock(memory.data(), memory.size()) == 0) return;
  const Error error = system_error(errno, fmt::format("lock {} bytes (raise `ulimit -l`)", memory.size()));
  refused.push_back({"memory lock", error.message});
}

// Registers memory like a lane that must bounce a transfer for the first time.
void probe_registration(const EngineConfig& config, const Buffer& memory, std::vector<Refusal>& refused) {
  if (config.backend != BackendKind::io_uring) return;
  for (const Refusal& known : refused) {
    if (known.what == "registered buffers") return;
  }
  auto backend = make_io_uring_backend(1);
  if (!backend) return;
  if (auto status = (*backend)->register_memory(memory.span()); !status)
    refused.push_back({"registered buffers", status.error().message});
}

// Allocates as much memory as a lane would bounce through, within what is left of the budget.
void probe_memory(const EngineCore& core, std::vector<Refusal>& refused) {
  constexpr std::uint64_t kMost = 64ULL << 20;
  const std::uint64_t bytes = core.config().slot_bytes * core.config().queue_depth;
  const auto memory = Buffer::allocate(std::min(bytes, kMost), core.budget());
  if (!memory) return;
  probe_memory_lock(*memory, refused);
  probe_registration(core.config(), *memory, refused);
}

void probe_huge_pages(std::vector<Refusal>& refused) {
  std::string line;
  std::ifstream setting("/sys/kernel/mm/transparent_hugepage/enabled");
  if (!std::getline(setting, line))
    refused.push_back({"huge pages", "this kernel has no transparent huge pages"});
  else if (line.find("[never]") != std::string::npos)
    refused.push_back(
        {"huge pages", "/sys/kernel/mm/transparent_hugepage/enabled is \"never\"; \"madvise\" suffices"});
}

// Why GPUs do not read and write the file themselves; nullopt where they do.
std::optional<std::string> why_not_gds(const EngineConfig& config, const os::FilePair& pair,
                                       const std::string& path, unsigned ordinal) {
  const auto device = cuda_device(ordinal);
  if (!device) return device.error().message;
  // For a directory, `pair` is a file in it.
  const std::string directory =
      os::is_directory(path) ? path : std::filesystem::path(path).parent_path().string();
  const auto opened =
      (*device)->open_gds({.fd = pair.direct.get(), .path = path, .directory = directory, .known = {}},
                          gds_probe_for(config.gpu));
  if (!opened) return opened.error().message;
  return std::nullopt;
}

// The part of it that can be determined without a GPU.
std::optional<std::string> why_not_gds(const EngineConfig& config, const os::FilePair& pair) {
  if (auto why = why_never_gds(config.gpu, pair)) return why;
  return config.gpu == GpuPath::automatic ? cufile::why_unavailable() : std::nullopt;
}

void explain_gpu(const EngineConfig& config, const os::FilePair& pair, const std::string& path,
                 Explanation& explanation) {
  auto why_not = why_not_gds(config, pair);
  if (!why_not) {
    // A context takes GPU memory, and rules out forking: none is created just to explain.
    const auto ordinal = cuda_device_in_use();
    if (!ordinal) {
      explanation.gpu = "unknown";
      explanation.gpu_why =
          "this process does not use a GPU yet, and the probe requires one: ask again once it does";
      return;
    }
    why_not = why_not_gds(config, pair, path, *ordinal);
  }
  explanation.gpu = why_not && !is_gds_required(config.gpu) ? "bounce" : "gds";
  if (!why_not) {
    explanation.gpu_why =
        is_gds_required(config.gpu)
            ? "it was requested, and a probe read the right bytes"
            : "a probe read the right bytes, without read(), io_uring or AIO in this process";
  } else if (is_gds_required(config.gpu)) {
    explanation.gpu_why = fmt::format("it was requested, but operations fail: {}", *why_not);
  } else {
    explanation.gpu_why = fmt::format("{}; GPU memory is copied through pinned buffers of {} bytes", *why_not,
                                      config.slot_bytes);
  }
}

}  // namespace

Result<Explanation> explain(const EngineCore& core, const std::string& path) {
  Explanation explanation;
  explanation.backend = to_string(core.config().backend);
  explanation.refused = core.refusals();
  const tuning::TuningTable* const tunings = core.tunings();
  const tuning::Tuning* const tuning = tunings != nullptr ? tunings->find({&path, 1}) : nullptr;
  auto pair = open_for_probe(path, tuned_policy(core.config(), Direct::automatic, tuning));
  if (!pair) return std::unexpected(pair.error());
  explanation.tuning = explain_tuning(core.config(), core.block_was_passed(), pair->limits, tuning,
                                      tunings != nullptr ? why_not_tuned(*tunings, path) : std::string());
  explanation.direct = pair->limits.usable;
  explanation.why = pair->limits.why;
  explanation.memory_alignment = pair->limits.memory_alignment;
  explanation.offset_alignment = pair->limits.offset_alignment;
  if (!pair->limits.usable) explanation.refused.push_back({"direct I/O", pair->limits.why});
  auto location = os::locate(path);
  if (!location) return std::unexpected(location.error());
  explanation.device = location->device;
  explanation.filesystem = location->filesystem;
  explanation.mount = location->mount;
  explain_gpu(core.config(), *pair, path, explanation);

  probe_memory(core, explanation.refused);
  probe_huge_pages(explanation.refused);
  return explanation;
}

}  // namespace trunkline::io
