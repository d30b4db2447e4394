#include "device/gds/session.h"

#include <unistd.h>

#include <cstdlib>
#include <utility>

namespace trunkline::cufile {
namespace {

// Set by tests to a library with the same symbols.
const char* library_override() {
  return std::getenv("TRUNKLINE_CUFILE");  // NOLINT(concurrency-mt-unsafe)
}

std::string library() {
  const char* const path = library_override();
  return path != nullptr ? path : "libcufile.so.0";
}

}  // namespace

std::optional<std::string> why_unavailable() {
  // The library is not asked: when it is opened without the module, it leaves a log in the working directory.
  if (library_override() == nullptr && ::access("/proc/driver/nvidia-fs", F_OK) != 0)
    return "the kernel module nvidia-fs is not loaded";
  const auto api = load(library());
  if (!api) return api.error().message;
  return std::nullopt;
}

Result<const Api*> Session::open_driver() {
  const std::scoped_lock lock(mutex_);
  if (api_ != nullptr) return api_.get();
  auto api = load(library());
  if (!api) return std::unexpected(api.error());
  const Outcome outcome = api->DriverOpen();
  if (outcome.code != kSuccess && outcome.code != kAlreadyOpen) {
    Error error = error_of(outcome, "cuFileDriverOpen", "open the driver of GPUDirect Storage");
    error.kind = ErrorKind::unsupported;
    return std::unexpected(std::move(error));
  }
  api_ = std::make_unique<const Api>(*api);
  return api_.get();
}

void Session::keep_forever(std::shared_ptr<const void> work) {
  const std::scoped_lock lock(mutex_);
  kept_.push_back(std::move(work));
}

}  // namespace trunkline::cufile
