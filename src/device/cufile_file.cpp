#include "device/cufile_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "device/cufile_driver.h"
#include "os/fork_generation.h"
#include "os/process_io.h"
#include "os/unique_fd.h"

namespace trunkline::cufile {
namespace {

constexpr std::size_t kProbeBytes = 64 * 1024;
// Of a read whose bytes other threads' reads may hide.
constexpr int kProbes = 8;

std::unexpected<Error> refused(const std::string& path, const std::string& why) {
  return std::unexpected(make_error(
      ErrorKind::unsupported, fmt::format("{} is not reached by GPUDirect Storage: {}", path, why), path));
}

class CufileFile final : public DirectFile {
 public:
  static Result<std::shared_ptr<const CufileFile>> open(const Api& api, const DirectSource& source) {
    Descriptor descriptor{.type = kLinuxDescriptor, .fd = source.fd, .operations = nullptr};
    Handle handle = nullptr;
    const Outcome outcome = api.HandleRegister(&handle, &descriptor);
    if (outcome.code == kSuccess) return std::make_shared<const CufileFile>(api, handle);
    return refused(source.path, error_of(outcome, "cuFileHandleRegister", "registering it").message);
  }

  CufileFile(const Api& api, Handle handle)
      : api_(api), handle_(handle), generation_(os::fork_generation()) {}
  ~CufileFile() override {
    if (generation_ == os::fork_generation()) api_.HandleDeregister(handle_);
  }

  const Api& api() const { return api_; }
  Handle handle() const { return handle_; }

 private:
  const Api& api_;
  const Handle handle_;
  const unsigned generation_;  // of forks
};

const CufileFile& cufile_file(const DirectFile& file) { return static_cast<const CufileFile&>(file); }

// Memory for direct I/O of the host.
struct Freed {
  void operator()(std::byte* memory) const { std::free(memory); }  // NOLINT(*-no-malloc)
};
using HostMemory = std::unique_ptr<std::byte, Freed>;

HostMemory host_memory() {
  return HostMemory(static_cast<std::byte*>(std::aligned_alloc(kDirectCopyAlignment, kProbeBytes)));
}

// What a probe works with on the device, and gives back.
class ProbeMemory {
 public:
  explicit ProbeMemory(const cuda::Api& api) : api_(api) {
    code_ = api.MemAlloc(&memory_, kProbeBytes);
    if (code_ == cuda::kSuccess) code_ = api.StreamCreate(&stream_, cuda::kStreamNonBlocking);
  }
  ProbeMemory(const ProbeMemory&) = delete;
  ProbeMemory& operator=(const ProbeMemory&) = delete;
  ~ProbeMemory() {
    if (stream_ != nullptr) api_.StreamDestroy(stream_);
    if (memory_ != 0) api_.MemFree(memory_);
  }
  cuda::Code code() const { return code_; }
  cuda::DevicePointer memory() const { return memory_; }
  cuda::Stream stream() const { return stream_; }

 private:
  const cuda::Api& api_;
  cuda::Code code_ = cuda::kSuccess;
  cuda::DevicePointer memory_ = 0;
  cuda::Stream stream_ = nullptr;
};

// A file with some bytes beside `path`, gone when it is closed.
Result<os::UniqueFd> make_probe_file(const std::string& path) {
  const std::string directory = std::filesystem::path(path).parent_path().string();
  std::string name = (directory.empty() ? "." : directory) + "/.trunkline-probe-XXXXXX";
  const auto failed = [&](std::string_view what) {
    return std::unexpected(system_error(errno, fmt::format("{} a probe file beside {}", what, path), path));
  };
  os::UniqueFd fd(::mkostemp(name.data(), O_CLOEXEC | O_DIRECT));
  if (!fd.valid()) return failed("creating");
  ::unlink(name.c_str());
  const HostMemory memory = host_memory();
  for (std::size_t at = 0; at < kProbeBytes; ++at)
    memory.get()[at] = static_cast<std::byte>((at * 2654435761U) >> 13U);
  if (::pwrite(fd.get(), memory.get(), kProbeBytes, 0) != static_cast<ssize_t>(kProbeBytes))
    return failed("writing");
  return fd;
}

bool is_readable(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_ACCMODE) != O_WRONLY;
}

// Reads the start of a file by cuFile and as the host does, and compares. Returns why it is not to be used.
std::optional<std::string> probe(const cuda::CudaDevice& device, const CufileFile& file, int fd,
                                 std::size_t bytes, DirectProof proof) {
  const cuda::Api& cuda = device.api();
  const ProbeMemory probe(cuda);
  const auto cuda_failed = [&](cuda::Code code, std::string_view function) {
    return error_of(cuda, code, function, "probing").message;
  };
  if (probe.code() != cuda::kSuccess) return cuda_failed(probe.code(), "cuMemAlloc");
  for (int attempt = 0; attempt < kProbes; ++attempt) {
    struct Call {
      std::size_t bytes = 0;
      off_t file_offset = 0;
      off_t memory_offset = 0;
      ssize_t moved = 0;
    };
    auto call = std::make_unique<Call>();
    call->bytes = bytes;
    const auto before = os::bytes_read_by_calls();
    const Outcome outcome = file.api().ReadAsync(
        file.handle(), reinterpret_cast<void*>(probe.memory()),  // NOLINT(performance-no-int-to-ptr)
        &call->bytes, &call->file_offset, &call->memory_offset, &call->moved, probe.stream());
    // Also after a refusal: what is pointed to must not be in use any more. Of a lost context nobody says.
    const cuda::Code ended = cuda.StreamSynchronize(probe.stream());
    const ssize_t moved = call->moved;
    if (ended != cuda::kSuccess) std::ignore = call.release();
    const auto after = os::bytes_read_by_calls();
    if (outcome.code != kSuccess) return error_of(outcome, "cuFileReadAsync", "probing").message;
    if (ended != cuda::kSuccess) return cuda_failed(ended, "cuStreamSynchronize");
    if (moved != static_cast<ssize_t>(bytes)) return error_of_result(moved, "probing").message;

    const HostMemory expected = host_memory();
    std::vector<std::byte> found(bytes);
    if (::pread(fd, expected.get(), bytes, 0) != static_cast<ssize_t>(bytes))
      return "the file could not be read for comparison";
    cuda::Code code = cuda.MemcpyDtoHAsync(found.data(), probe.memory(), bytes, probe.stream());
    if (code == cuda::kSuccess) code = cuda.StreamSynchronize(probe.stream());
    if (code != cuda::kSuccess) return cuda_failed(code, "cuMemcpyDtoHAsync");
    if (std::memcmp(found.data(), expected.get(), bytes) != 0)
      return "what cuFile read from it differs from what it holds";
    if (proof == DirectProof::works) return std::nullopt;
    if (!before || !after) return "/proc/self/io, which would show that reads are direct, cannot be read";
    if (*after - *before < bytes) return std::nullopt;
  }
  return "cuFile reads it with read() in this process (its compatibility mode)";
}

Result<void> prove(const cuda::CudaDevice& device, const CufileFile& file, const DirectSource& source,
                   DirectProof proof) {
  struct stat status{};
  std::size_t bytes = 0;
  if (is_readable(source.fd) && ::fstat(source.fd, &status) == 0 && S_ISREG(status.st_mode))
    bytes = std::min<std::size_t>(kProbeBytes, static_cast<std::size_t>(status.st_size)) /
            kDirectCopyAlignment * kDirectCopyAlignment;
  std::optional<std::string> why;
  if (bytes > 0) {
    why = probe(device, file, source.fd, bytes, proof);
  } else {
    const auto other = make_probe_file(source.path);
    if (!other) return refused(source.path, other.error().message);
    const auto registered =
        CufileFile::open(file.api(), {.fd = other->get(), .path = source.path, .known = {}});
    if (!registered) return std::unexpected(registered.error());
    why = probe(device, **registered, other->get(), kProbeBytes, proof);
  }
  if (why) return refused(source.path, *why);
  return {};
}

// Once for each filesystem and device.
Result<void> prove_once(const cuda::CudaDevice& device, const CufileFile& file, const DirectSource& source,
                        DirectProof proof) {
  static std::mutex mutex;
  static auto* proven =  // NOLINT(cppcoreguidelines-owning-memory): until the very end
      new std::set<std::tuple<dev_t, std::string_view, DirectProof>>;
  struct stat status{};
  if (::fstat(source.fd, &status) != 0)
    return std::unexpected(system_error(errno, fmt::format("looking at {}", source.path), source.path));
  const std::tuple key(status.st_dev, device.name(), proof);
  const std::scoped_lock lock(mutex);
  if (proven->contains(key)) return {};
  if (auto shown = prove(device, file, source, proof); !shown) return shown;
  proven->insert(key);
  return {};
}

}  // namespace

Result<std::shared_ptr<const DirectFile>> open_file(const cuda::CudaDevice& device,
                                                    const DirectSource& source, DirectProof proof) {
  if (proof == DirectProof::real) {
    if (const auto why = why_not_here()) return refused(source.path, *why);
  }
  const cuda::Current current(device);
  if (current.code() != cuda::kSuccess)
    return std::unexpected(error_of(device.api(), current.code(), "cuCtxPushCurrent", "opening a file"));
  const auto api = open_driver();
  if (!api) return refused(source.path, api.error().message);
  DriverProperties properties{};
  const Outcome outcome = (*api)->DriverGetProperties(&properties);
  if (outcome.code != kSuccess)
    return refused(source.path, error_of(outcome, "cuFileDriverGetProperties", "asking").message);
  if (proof == DirectProof::real && properties.status_flags == 0)
    return refused(source.path, "cuFile names no storage that it reaches directly (its compatibility mode)");
  std::shared_ptr<const DirectFile> file = source.known;
  if (file == nullptr) {
    auto opened = CufileFile::open(**api, source);
    if (!opened) return std::unexpected(opened.error());
    file = *std::move(opened);
  }
  auto shown = prove_once(device, cufile_file(*file), source, proof);
  if (!shown) return std::unexpected(shown.error());
  return file;
}

const Api& api_of(const DirectFile& file) { return cufile_file(file).api(); }
Handle handle_of(const DirectFile& file) { return cufile_file(file).handle(); }

}  // namespace trunkline::cufile
