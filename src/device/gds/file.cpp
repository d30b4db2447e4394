#include "device/gds/file.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <utility>

#include "device/gds/session.h"
#include "os/fork_generation.h"

namespace trunkline::cufile {

Result<std::shared_ptr<const CufileFile>> CufileFile::open(const Api& api, int fd, const std::string& path) {
  os::UniqueFd duplicate(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!duplicate.valid())
    return std::unexpected(system_error(errno, fmt::format("duplicate a descriptor of {}", path), path));
  Descriptor descriptor{.type = kLinuxDescriptor, .fd = duplicate.get(), .operations = nullptr};
  Handle handle = nullptr;
  const Outcome outcome = api.HandleRegister(&handle, &descriptor);
  if (outcome.code == kSuccess) return std::make_shared<const CufileFile>(api, std::move(duplicate), handle);
  return std::unexpected(
      unsupported_file(path, error_of(outcome, "cuFileHandleRegister", "register it").message));
}

CufileFile::CufileFile(const Api& api, os::UniqueFd fd, Handle handle)
    : api_(api), fd_(std::move(fd)), handle_(handle), generation_(os::fork_generation()) {}

CufileFile::~CufileFile() {
  if (generation_ == os::fork_generation()) api_.HandleDeregister(handle_);
}

Error unsupported_file(const std::string& path, const std::string& why) {
  return make_error(ErrorKind::unsupported,
                    fmt::format("GPUDirect Storage cannot be used for {}: {}", path, why), path);
}

Result<std::shared_ptr<const GdsFile>> open_file(const cuda::CudaDevice& device, const GdsSource& source,
                                                 GdsProbe probe) {
  const auto unsupported = [&](const std::string& why) {
    return std::unexpected(unsupported_file(source.path, why));
  };
  if (probe == GdsProbe::bypasses_host) {
    if (const auto why = why_unavailable()) return unsupported(*why);
  }
  const cuda::ScopedContext context(device);
  if (context.code() != cuda::kSuccess)
    return std::unexpected(
        error_of(device.api(), context.code(), "cuCtxPushCurrent", "open a file for GPUDirect Storage"));
  Session& session = device.gds();
  const auto api = session.open_driver();
  if (!api) return unsupported(api.error().message);
  DriverProperties properties{};
  const Outcome outcome = (*api)->DriverGetProperties(&properties);
  if (outcome.code != kSuccess)
    return unsupported(
        error_of(outcome, "cuFileDriverGetProperties", "read the properties of its driver").message);
  if (probe == GdsProbe::bypasses_host && properties.status_flags == 0)
    return unsupported("cuFile names no storage that it reaches directly (its compatibility mode)");
  std::shared_ptr<const GdsFile> file = source.known;
  if (file == nullptr) {
    auto opened = CufileFile::open(**api, source.fd, source.path);
    if (!opened) return std::unexpected(opened.error());
    file = *std::move(opened);
  }
  const auto result = session.probes().probe(device, cufile_file(*file), source, probe);
  if (!result) return std::unexpected(result.error());
  const WhyNot& why_not = *result;
  if (why_not) return unsupported(*why_not);
  return file;
}

}  // namespace trunkline::cufile
