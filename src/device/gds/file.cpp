#include "device/gds/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "device/gds/session.h"
#include "os/async_queues.h"
#include "os/fork_generation.h"
#include "os/process_io.h"
#include "os/unique_fd.h"

namespace trunkline::cufile {
namespace {

constexpr std::size_t kProbeBytes = 64 * 1024;
// Of a read whose bytes other threads' reads may hide.
constexpr int kProbes = 8;
// What asking for the count adds to it.
constexpr std::uint64_t kBesides = 4096;

std::unexpected<Error> refused(const std::string& path, const std::string& why) {
  return std::unexpected(make_error(
      ErrorKind::unsupported, fmt::format("GPUDirect Storage cannot be used for {}: {}", path, why), path));
}

// With a descriptor of its own: cuFile may work on it for longer than the caller's is open, where a context
// is lost.
class CufileFile final : public GdsFile {
 public:
  static Result<std::shared_ptr<const CufileFile>> open(const Api& api, int fd, const std::string& path) {
    os::UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!own.valid())
      return std::unexpected(system_error(errno, fmt::format("duplicating a descriptor of {}", path), path));
    Descriptor descriptor{.type = kLinuxDescriptor, .fd = own.get(), .operations = nullptr};
    Handle handle = nullptr;
    const Outcome outcome = api.HandleRegister(&handle, &descriptor);
    if (outcome.code == kSuccess) return std::make_shared<const CufileFile>(api, std::move(own), handle);
    return refused(path, error_of(outcome, "cuFileHandleRegister", "registering it").message);
  }

  CufileFile(const Api& api, os::UniqueFd fd, Handle handle)
      : api_(api), fd_(std::move(fd)), handle_(handle), generation_(os::fork_generation()) {}
  ~CufileFile() override {
    if (generation_ == os::fork_generation()) api_.HandleDeregister(handle_);
  }

  const Api& api() const { return api_; }
  Handle handle() const { return handle_; }

 private:
  const Api& api_;
  const os::UniqueFd fd_;
  const Handle handle_;
  const unsigned generation_;  // of forks
};

const CufileFile& cufile_file(const GdsFile& file) { return static_cast<const CufileFile&>(file); }

// Memory for direct I/O of the host.
struct Freed {
  void operator()(std::byte* memory) const { std::free(memory); }  // NOLINT(*-no-malloc)
};
using HostMemory = std::unique_ptr<std::byte, Freed>;

HostMemory host_memory() {
  return HostMemory(static_cast<std::byte*>(std::aligned_alloc(kGdsAlignment, kProbeBytes)));
}

// What probes of a device work with. Kept until the process ends: freeing memory waits for all that the
// device does.
struct ProbeMemory {
  cuda::DevicePointer memory = 0;
  cuda::Stream stream = nullptr;
};

Result<ProbeMemory> probe_memory(const cuda::CudaDevice& device) {
  static auto* kept =  // NOLINT(cppcoreguidelines-owning-memory): until the very end
      new std::map<std::string_view, ProbeMemory>;
  ProbeMemory& probe = (*kept)[device.name()];
  const auto failed = [&](cuda::Code code, std::string_view function) {
    return std::unexpected(error_of(device.api(), code, function, "probing GPUDirect Storage"));
  };
  if (probe.memory == 0) {
    const cuda::Code code = device.api().MemAlloc(&probe.memory, kProbeBytes);
    if (code != cuda::kSuccess) return failed(code, "cuMemAlloc");
  }
  if (probe.stream == nullptr) {
    const cuda::Code code = device.api().StreamCreate(&probe.stream, cuda::kStreamNonBlocking);
    if (code != cuda::kSuccess) return failed(code, "cuStreamCreate");
  }
  return probe;
}

// A file with some bytes, gone when it is closed.
Result<os::UniqueFd> make_probe_file(const std::string& directory) {
  std::string name = (directory.empty() ? "." : directory) + "/.trunkline-probe-XXXXXX";
  const auto failed = [&](std::string_view what) {
    return std::unexpected(
        system_error(errno, fmt::format("{} a probe file in {}", what, directory), directory));
  };
  os::UniqueFd fd(::mkostemp(name.data(), O_CLOEXEC));
  if (!fd.valid()) return failed("creating");
  ::unlink(name.c_str());
  // Only now: where it is refused, the file would stay.
  if (::fcntl(fd.get(), F_SETFL, O_DIRECT) != 0) return failed("making direct");
  const HostMemory memory = host_memory();
  for (std::size_t at = 0; at < kProbeBytes; ++at)
    memory.get()[at] = static_cast<std::byte>((at * 2654435761U) >> 13U);
  if (::pwrite(fd.get(), memory.get(), kProbeBytes, 0) != static_cast<ssize_t>(kProbeBytes))
    return failed("writing");
  return fd;
}

int access_mode(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags < 0 ? O_WRONLY : flags & O_ACCMODE;
}

// What a probe came to: why not, or that it is fine.
using Verdict = std::optional<std::string>;

// Reads the start of a file by cuFile and as the host does, and compares. An error says nothing of the file.
Result<Verdict> probe(const cuda::CudaDevice& device, const CufileFile& file, int fd, std::size_t bytes,
                      GdsProbe proof) {
  const cuda::Api& cuda = device.api();
  const auto memory = probe_memory(device);
  if (!memory) return std::unexpected(memory.error());
  const auto cuda_failed = [&](cuda::Code code, std::string_view function) {
    return std::unexpected(error_of(cuda, code, function, "probing GPUDirect Storage"));
  };
  bool quiet = false;  // at some time no other thread read
  bool by_calls = false;
  const HostMemory expected = host_memory();
  std::vector<std::byte> found(bytes);
  for (int attempt = 0; attempt < kProbes; ++attempt) {
    if (::pread(fd, expected.get(), bytes, 0) != static_cast<ssize_t>(bytes))
      return "the file could not be read for comparison";
    // What an earlier probe left must not be taken for what this one reads.
    for (std::size_t at = 0; at < bytes; ++at) found[at] = ~expected.get()[at];
    cuda::Code code = cuda.MemcpyHtoDAsync(memory->memory, found.data(), bytes, memory->stream);
    if (code == cuda::kSuccess) code = cuda.StreamSynchronize(memory->stream);
    if (code != cuda::kSuccess) return cuda_failed(code, "cuMemcpyHtoDAsync");
    struct Call {
      std::size_t bytes = 0;
      off_t file_offset = 0;
      off_t memory_offset = 0;
      ssize_t moved = 0;
    };
    auto call = std::make_unique<Call>();
    call->bytes = bytes;
    const auto queues_before = os::progress_of_other_queues();
    const auto before = os::bytes_read_by_calls();
    const Outcome outcome = file.api().ReadAsync(
        file.handle(), reinterpret_cast<void*>(memory->memory),  // NOLINT(performance-no-int-to-ptr)
        &call->bytes, &call->file_offset, &call->memory_offset, &call->moved, memory->stream);
    // Also after a refusal: what is pointed to must not be in use any more. Of a lost context nobody says.
    const cuda::Code ended = cuda.StreamSynchronize(memory->stream);
    const ssize_t moved = call->moved;
    if (ended != cuda::kSuccess) std::ignore = call.release();
    const auto after = os::bytes_read_by_calls();
    const auto queues_after = os::progress_of_other_queues();
    if (ended != cuda::kSuccess) return cuda_failed(ended, "cuStreamSynchronize");
    if (outcome.code != kSuccess) return error_of(outcome, "cuFileReadAsync", "probing").message;
    if (moved != static_cast<ssize_t>(bytes)) return error_of_result(moved, "probing").message;

    code = cuda.MemcpyDtoHAsync(found.data(), memory->memory, bytes, memory->stream);
    if (code == cuda::kSuccess) code = cuda.StreamSynchronize(memory->stream);
    if (code != cuda::kSuccess) return cuda_failed(code, "cuMemcpyDtoHAsync");
    if (std::memcmp(found.data(), expected.get(), bytes) != 0)
      return "cuFile read other bytes than the file holds";
    if (proof == GdsProbe::works) return std::nullopt;
    if (!before || !after) return "/proc/self/io, which would show that reads are direct, cannot be read";
    if (!queues_before || !queues_after)
      return "/proc/self, which would show that reads are direct and not by io_uring or AIO, cannot be read";
    const std::uint64_t read = *after - *before;
    if (read < bytes && *queues_before == *queues_after) return std::nullopt;
    by_calls = by_calls || read >= bytes;
    quiet = quiet || (read >= bytes && read < bytes + kBesides);
  }
  std::string why = "cuFile reads it with read() in this process (its compatibility mode)";
  if (quiet) return why;
  // Whose the queues are nobody can tell: other libraries have some, too.
  return std::unexpected(make_error(
      ErrorKind::unsupported,
      by_calls ? why + ", or this is inconclusive, since other threads were reading"
               : "cuFile reads it by io_uring or AIO in this process (its compatibility mode), or another "
                 "library's queue was at work whenever it was tried"));
}

// On a file of its own, which nobody changes meanwhile.
Result<Verdict> probe_beside(const cuda::CudaDevice& device, const CufileFile& file, int other,
                             const std::string& path, GdsProbe proof) {
  const auto registered = CufileFile::open(file.api(), other, path);
  if (!registered) return std::unexpected(registered.error());
  return probe(device, **registered, other, kProbeBytes, proof);
}

// On the file itself. Others may be writing to it, so a failure says nothing of the filesystem.
Result<Verdict> probe_itself(const cuda::CudaDevice& device, const CufileFile& file, const GdsSource& source,
                             std::size_t bytes, GdsProbe proof) {
  auto verdict = probe(device, file, source.fd, bytes, proof);
  if (!verdict) return verdict;
  const Verdict& why_not = *verdict;
  if (why_not) return refused(source.path, *why_not);
  return verdict;
}

Result<Verdict> prove(const cuda::CudaDevice& device, const CufileFile& file, const GdsSource& source,
                      const struct stat& status, GdsProbe proof) {
  const auto other = make_probe_file(source.directory);
  struct stat beside{};
  // Elsewhere where the name is a link, or something is mounted there.
  if (other && ::fstat(other->get(), &beside) == 0 && beside.st_dev == status.st_dev)
    return probe_beside(device, file, other->get(), source.path, proof);
  std::size_t bytes = 0;
  if (access_mode(source.fd) == O_RDONLY && S_ISREG(status.st_mode))
    bytes = std::min<std::size_t>(kProbeBytes, static_cast<std::size_t>(status.st_size)) / kGdsAlignment *
            kGdsAlignment;
  if (bytes > 0) return probe_itself(device, file, source, bytes, proof);
  if (!other) return std::unexpected(other.error());
  return refused(source.path,
                 "the directory that its name leads to is on another filesystem, and no probe "
                 "file can be made beside it");
}

// What was found out, for each filesystem, device and proof.
class Verdicts {
 public:
  Result<Verdict> of(const cuda::CudaDevice& device, const CufileFile& file, const GdsSource& source,
                     GdsProbe proof) {
    struct stat status{};
    if (::fstat(source.fd, &status) != 0)
      return std::unexpected(system_error(errno, fmt::format("looking at {}", source.path), source.path));
    const Key key(status.st_dev, device.name(), proof);
    if (auto known = find(key)) return *std::move(known);
    const std::scoped_lock one_at_a_time(probing_);  // what is known already waits for no slow filesystem
    if (auto known = find(key)) return *std::move(known);
    auto found = prove(device, file, source, status, proof);
    if (found) {
      const std::scoped_lock lock(mutex_);
      known_[key] = *found;
    }
    return found;
  }

  void forget() {
    const std::scoped_lock lock(mutex_);
    known_.clear();
  }

 private:
  using Key = std::tuple<dev_t, std::string_view, GdsProbe>;

  std::optional<Verdict> find(const Key& key) {
    const std::scoped_lock lock(mutex_);
    const auto found = known_.find(key);
    if (found == known_.end()) return std::nullopt;
    return found->second;
  }

  std::mutex probing_;
  std::mutex mutex_;
  std::map<Key, Verdict> known_;
};

Verdicts& verdicts() {
  static auto* kept = new Verdicts;  // NOLINT(cppcoreguidelines-owning-memory): until the very end
  return *kept;
}

}  // namespace

void forget_verdicts() { verdicts().forget(); }

Result<std::shared_ptr<const GdsFile>> open_file(const cuda::CudaDevice& device, const GdsSource& source,
                                                 GdsProbe proof) {
  if (proof == GdsProbe::real) {
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
  if (proof == GdsProbe::real && properties.status_flags == 0)
    return refused(source.path, "cuFile names no storage that it reaches directly (its compatibility mode)");
  std::shared_ptr<const GdsFile> file = source.known;
  if (file == nullptr) {
    auto opened = CufileFile::open(**api, source.fd, source.path);
    if (!opened) return std::unexpected(opened.error());
    file = *std::move(opened);
  }
  const auto verdict = verdicts().of(device, cufile_file(*file), source, proof);
  if (!verdict) return std::unexpected(verdict.error());
  const Verdict& why_not = *verdict;
  if (why_not) return refused(source.path, *why_not);
  return file;
}

const Api& api_of(const GdsFile& file) { return cufile_file(file).api(); }
Handle handle_of(const GdsFile& file) { return cufile_file(file).handle(); }

}  // namespace trunkline::cufile
