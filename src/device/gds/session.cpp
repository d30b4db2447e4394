#include "device/gds/session.h"

#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <mutex>

namespace trunkline::cufile {
namespace {

// Another library with the same symbols, for tests.
const char* named_library() {
  return std::getenv("TRUNKLINE_CUFILE");  // NOLINT(concurrency-mt-unsafe)
}

std::string library() {
  const char* named = named_library();
  return named != nullptr ? named : "libcufile.so.0";
}

}  // namespace

std::optional<std::string> why_not_here() {
  // Not asked of the library: opened without the module, it leaves a log in the working directory.
  if (named_library() == nullptr && ::access("/proc/driver/nvidia-fs", F_OK) != 0)
    return "the kernel module nvidia-fs is not loaded";
  const auto api = load(library());
  if (!api) return api.error().message;
  return std::nullopt;
}

Result<const Api*> open_driver() {
  static std::mutex mutex;
  static const Api* opened = nullptr;  // used until the very end
  const std::scoped_lock lock(mutex);
  if (opened != nullptr) return opened;
  auto api = load(library());
  if (!api) return std::unexpected(api.error());
  const Outcome outcome = api->DriverOpen();
  if (outcome.code != kSuccess && outcome.code != kAlreadyOpen) {
    Error error = error_of(outcome, "cuFileDriverOpen", "GPUDirect Storage");
    error.kind = ErrorKind::unsupported;
    return std::unexpected(std::move(error));
  }
  opened = std::make_unique<const Api>(*api).release();
  return opened;
}

}  // namespace trunkline::cufile
