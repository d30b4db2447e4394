#include "device/gds/filesystem_probes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "device/gds/file.h"
#include "device/gds/session.h"
#include "os/async_queues.h"
#include "os/process_io.h"
#include "os/unique_fd.h"

namespace trunkline::cufile {
namespace {

constexpr std::size_t kProbeBytes = 64 * 1024;
// Attempts to find a moment at which no other thread reads.
constexpr int kAttempts = 8;
// What reading the count of bytes adds to it.
constexpr std::uint64_t kCountingBytes = 4096;

// Host memory for direct I/O.
struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }  // NOLINT(*-no-malloc)
};
using HostMemory = std::unique_ptr<std::byte, Free>;

HostMemory host_memory() {
  return HostMemory(static_cast<std::byte*>(std::aligned_alloc(kGdsAlignment, kProbeBytes)));
}

// Creates a file without a name, of kProbeBytes.
Result<os::UniqueFd> make_probe_file(const std::string& directory) {
  std::string name = (directory.empty() ? "." : directory) + "/.trunkline-probe-XXXXXX";
  const auto failed = [&](std::string_view action) {
    return std::unexpected(
        system_error(errno, fmt::format("{} a probe file in {}", action, directory), directory));
  };
  os::UniqueFd fd(::mkostemp(name.data(), O_CLOEXEC));
  if (!fd.valid()) return failed("create");
  ::unlink(name.c_str());
  // After the unlink: where the flag is refused, the file would stay.
  if (::fcntl(fd.get(), F_SETFL, O_DIRECT) != 0) return failed("set O_DIRECT for");
  const HostMemory memory = host_memory();
  for (std::size_t index = 0; index < kProbeBytes; ++index)
    memory.get()[index] = static_cast<std::byte>((index * 2654435761U) >> 13U);
  if (::pwrite(fd.get(), memory.get(), kProbeBytes, 0) != static_cast<ssize_t>(kProbeBytes))
    return failed("write");
  return fd;
}

int access_mode(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags < 0 ? O_WRONLY : flags & O_ACCMODE;
}

// Whether reads went through the host, by the kernel's counters of this process. They count the reads of all
// threads, so only a read during which no other thread reads decides.
class HostReads {
 public:
  void begin() {
    queues_before_ = os::progress_of_other_queues();  // first: it reads files itself
    bytes_before_ = os::bytes_read_by_calls();
  }
  void end() {
    bytes_after_ = os::bytes_read_by_calls();
    queues_after_ = os::progress_of_other_queues();
  }

  // Why nothing can be determined here.
  WhyNot why_unknown() const {
    if (!bytes_before_ || !bytes_after_)
      return "/proc/self/io, which would show that reads are direct, cannot be read";
    if (!queues_before_ || !queues_after_)
      return "/proc/self, which would show that reads are direct and not by io_uring or AIO, cannot be read";
    return std::nullopt;
  }

  // Evaluates the read of `bytes` between begin() and end(); true: it did not go through the host.
  bool bypassed(std::size_t bytes) {
    const std::uint64_t read = bytes_after_.value_or(0) - bytes_before_.value_or(0);
    if (read < bytes && queues_before_ == queues_after_) return true;
    seen_ = seen_ || read >= bytes;
    seen_alone_ = seen_alone_ || (read >= bytes && read < bytes + kCountingBytes);
    return false;
  }

  // After reads none of which bypassed the host. An error: this is inconclusive, and may differ next time.
  Result<WhyNot> conclusion() const {
    std::string by_read = "cuFile reads it with read() in this process (its compatibility mode)";
    if (seen_alone_) return by_read;
    // Nothing shows whose queue it is: other libraries have some, too.
    return std::unexpected(make_error(
        ErrorKind::unsupported,
        seen_ ? by_read + ", or this is inconclusive, since other threads were reading"
              : "cuFile reads it by io_uring or AIO in this process (its compatibility mode), or another "
                "library's queue was at work whenever it was tried"));
  }

 private:
  std::optional<std::uint64_t> queues_before_;
  std::optional<std::uint64_t> bytes_before_;
  std::optional<std::uint64_t> bytes_after_;
  std::optional<std::uint64_t> queues_after_;
  bool seen_ = false;        // a read of the host
  bool seen_alone_ = false;  // one, while no other thread read
};

// Reads the start of a file by cuFile and as the host does, and compares.
class FileProbe {
 public:
  FileProbe(const cuda::CudaDevice& device, FilesystemProbes::Memory memory, const CufileFile& file, int fd,
            std::size_t bytes)
      : device_(device), memory_(memory), file_(file), fd_(fd), bytes_(bytes), found_(bytes) {}

  // An error says nothing of the file.
  Result<WhyNot> run(GdsProbe kind) {
    HostReads host_reads;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      if (::pread(fd_, expected_.get(), bytes_, 0) != static_cast<ssize_t>(bytes_))
        return "the file could not be read for comparison";
      if (auto cleared = clear(); !cleared) return std::unexpected(cleared.error());
      auto why_not = read(host_reads);
      if (!why_not || *why_not) return why_not;
      if (auto copied = copy_back(); !copied) return std::unexpected(copied.error());
      if (std::memcmp(found_.data(), expected_.get(), bytes_) != 0)
        return "cuFile read other bytes than the file holds";
      if (kind == GdsProbe::correct_data) return std::nullopt;
      if (auto why = host_reads.why_unknown()) return why;
      if (host_reads.bypassed(bytes_)) return std::nullopt;
    }
    return host_reads.conclusion();
  }

 private:
  // What cuFile is given pointers into.
  struct Call {
    std::size_t bytes = 0;
    off_t file_offset = 0;
    off_t memory_offset = 0;
    ssize_t moved = 0;
  };

  std::unexpected<Error> failed(cuda::Code code, std::string_view function) const {
    return std::unexpected(error_of(device_.api(), code, function, "probe GPUDirect Storage"));
  }

  // Fills the device's memory with other bytes than the file's, so that those of an earlier probe cannot be
  // mistaken for this one's.
  Status clear() {
    for (std::size_t index = 0; index < bytes_; ++index) found_[index] = ~expected_.get()[index];
    cuda::Code code = device_.api().MemcpyHtoDAsync(memory_.address, found_.data(), bytes_, memory_.stream);
    if (code == cuda::kSuccess) code = device_.api().StreamSynchronize(memory_.stream);
    if (code != cuda::kSuccess) return failed(code, "cuMemcpyHtoDAsync");
    return {};
  }

  Result<WhyNot> read(HostReads& host_reads) {
    auto call = std::make_unique<Call>();
    call->bytes = bytes_;
    host_reads.begin();
    const Outcome outcome = file_.api().ReadAsync(
        file_.handle(), reinterpret_cast<void*>(memory_.address),  // NOLINT(performance-no-int-to-ptr)
        &call->bytes, &call->file_offset, &call->memory_offset, &call->moved, memory_.stream);
    // Also after an error: cuFile must not use the call any more.
    const cuda::Code ended = device_.api().StreamSynchronize(memory_.stream);
    const ssize_t moved = call->moved;
    if (ended != cuda::kSuccess) {  // the context is lost: nothing reports when cuFile stops using the call
      device_.gds().keep_forever(std::move(call));
      return failed(ended, "cuStreamSynchronize");
    }
    host_reads.end();
    if (outcome.code != kSuccess) return error_of(outcome, "cuFileReadAsync", "probe it").message;
    if (moved != static_cast<ssize_t>(bytes_)) return error_of_result(moved, "probe it").message;
    return std::nullopt;
  }

  Status copy_back() {
    cuda::Code code = device_.api().MemcpyDtoHAsync(found_.data(), memory_.address, bytes_, memory_.stream);
    if (code == cuda::kSuccess) code = device_.api().StreamSynchronize(memory_.stream);
    if (code != cuda::kSuccess) return failed(code, "cuMemcpyDtoHAsync");
    return {};
  }

  const cuda::CudaDevice& device_;
  const FilesystemProbes::Memory memory_;
  const CufileFile& file_;
  const int fd_;
  const std::size_t bytes_;
  const HostMemory expected_ = host_memory();
  std::vector<std::byte> found_;
};

}  // namespace

Result<WhyNot> FilesystemProbes::probe(const cuda::CudaDevice& device, const CufileFile& file,
                                       const GdsSource& source, GdsProbe kind) {
  struct stat status{};
  if (::fstat(source.fd, &status) != 0)
    return std::unexpected(
        system_error(errno, fmt::format("read the attributes of {}", source.path), source.path));
  const Key key(status.st_dev, device.name(), kind);
  if (auto known = find(key)) return *std::move(known);
  const std::scoped_lock one_at_a_time(probing_);  // find() does not wait for a slow filesystem
  if (auto known = find(key)) return *std::move(known);
  auto result = run(device, file, source, status, kind);
  if (result) {
    const std::scoped_lock lock(mutex_);
    results_[key] = *result;
  }
  return result;
}

void FilesystemProbes::forget() {
  const std::scoped_lock lock(mutex_);
  results_.clear();
}

std::optional<WhyNot> FilesystemProbes::find(const Key& key) {
  const std::scoped_lock lock(mutex_);
  const auto found = results_.find(key);
  if (found == results_.end()) return std::nullopt;
  return found->second;
}

// On a file beside the caller's, which nobody changes meanwhile; if that is impossible on the caller's,
// provided that this one cannot be written to through its descriptor.
Result<WhyNot> FilesystemProbes::run(const cuda::CudaDevice& device, const CufileFile& file,
                                     const GdsSource& source, const struct stat& status, GdsProbe kind) {
  const auto memory = memory_of(device);
  if (!memory) return std::unexpected(memory.error());
  const auto probe_file = make_probe_file(source.directory);
  struct stat probe_status{};
  // On another filesystem where the name is a link, or a mount point.
  if (probe_file && ::fstat(probe_file->get(), &probe_status) == 0 && probe_status.st_dev == status.st_dev) {
    const auto registered = CufileFile::open(file.api(), probe_file->get(), source.path);
    if (!registered) return std::unexpected(registered.error());
    return FileProbe(device, *memory, **registered, probe_file->get(), kProbeBytes).run(kind);
  }
  std::size_t bytes = 0;
  if (access_mode(source.fd) == O_RDONLY && S_ISREG(status.st_mode))
    bytes = std::min<std::size_t>(kProbeBytes, static_cast<std::size_t>(status.st_size)) / kGdsAlignment *
            kGdsAlignment;
  if (bytes > 0) {
    const auto result = FileProbe(device, *memory, file, source.fd, bytes).run(kind);
    if (!result) return std::unexpected(result.error());
    // Others may be writing to it, so that a failure says nothing of the filesystem.
    const WhyNot& why_not = *result;
    if (why_not) return std::unexpected(unsupported_file(source.path, *why_not));
    return std::nullopt;
  }
  if (!probe_file) return std::unexpected(probe_file.error());
  return std::unexpected(unsupported_file(source.path,
                                          "the directory that its name leads to is on another filesystem, "
                                          "and no probe file can be made beside it"));
}

Result<FilesystemProbes::Memory> FilesystemProbes::memory_of(const cuda::CudaDevice& device) {
  Memory& memory = memory_[device.name()];
  const auto failed = [&](cuda::Code code, std::string_view function) {
    return std::unexpected(error_of(device.api(), code, function, "probe GPUDirect Storage"));
  };
  if (memory.address == 0) {
    const cuda::Code code = device.api().MemAlloc(&memory.address, kProbeBytes);
    if (code != cuda::kSuccess) return failed(code, "cuMemAlloc");
  }
  if (memory.stream == nullptr) {
    const cuda::Code code = device.api().StreamCreate(&memory.stream, cuda::kStreamNonBlocking);
    if (code != cuda::kSuccess) return failed(code, "cuStreamCreate");
  }
  return memory;
}

}  // namespace trunkline::cufile
