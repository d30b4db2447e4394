#include "os/file_pair.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>

#include "base/creation_error.h"
#include "os/durable.h"
#include "os/environment.h"
#include "os/filesystem_magic.h"
#include "os/local_filesystem.h"
#include "os/page_cache.h"
#include "os/read_text.h"

namespace trunkline::os {
namespace {

constexpr std::uint64_t kAssumedAlignment = 4096;  // where statx reports none: no device in use needs more

struct Filesystem {
  bool in_memory = false;
  bool local = false;
  std::string_view network;  // its name, when direct I/O is known to be slower there
};

Filesystem filesystem_of(int fd) {
  struct statfs status{};
  if (::fstatfs(fd, &status) != 0) return {};
  const auto type = static_cast<std::uint32_t>(status.f_type);
  Filesystem filesystem;
  filesystem.local = is_local_filesystem(type);
  switch (type) {
    case TMPFS_MAGIC:
    case RAMFS_MAGIC:
    case HUGETLBFS_MAGIC:
      filesystem.in_memory = true;
      break;
    case NFS_SUPER_MAGIC:
      filesystem.network = "NFS";
      break;
    case SMB_SUPER_MAGIC:
    case kSmb2Magic:
    case kCifsMagic:
      filesystem.network = "SMB";
      break;
    case CEPH_SUPER_MAGIC:
      filesystem.network = "Ceph";
      break;
    case kLustreMagic:
      filesystem.network = "Lustre";
      break;
    case kGpfsMagic:
      filesystem.network = "GPFS";
      break;
    case kBeegfsMagic:
      filesystem.network = "BeeGFS";
      break;
    case FUSE_SUPER_MAGIC:
      filesystem.network = "FUSE";
      break;
    case V9FS_MAGIC:
      filesystem.network = "9p";
      break;
    case AFS_SUPER_MAGIC:
      filesystem.network = "AFS";
      break;
    default:
      break;
  }
  return filesystem;
}

// A second open file description of the same inode, so that a path replaced meanwhile cannot split the pair.
UniqueFd reopen_direct(int fd, int flags, int& code) {
  const std::string link = fmt::format("/proc/self/fd/{}", fd);
  const int kept = flags & (O_ACCMODE | O_CLOEXEC);
  UniqueFd direct(::open(link.c_str(), kept | O_DIRECT | O_CLOEXEC));
  code = direct.valid() ? 0 : errno;
  return direct;
}

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }  // NOLINT(*-no-malloc)
};

// 0 when a direct read of the assumed alignment succeeds, else its errno. A write-only file cannot be probed.
int probe_read(int fd) {
  const std::unique_ptr<void, FreeDeleter> block(std::aligned_alloc(kAssumedAlignment, kAssumedAlignment));
  if (!block) return ENOMEM;
  ssize_t moved = 0;
  do moved = ::pread(fd, block.get(), kAssumedAlignment, 0);
  while (moved < 0 && errno == EINTR);
  return moved < 0 ? errno : 0;
}

DirectLimits refuse(std::string why) {
  return {.usable = false, .memory_alignment = 1, .offset_alignment = 1, .why = std::move(why)};
}

// Alignment as reported by the kernel (statx(2), STATX_DIOALIGN, Linux 6.1), or nothing where it does not
// report it.
struct StatedAlignment {
  std::uint64_t memory;
  std::uint64_t offset;
};
std::optional<StatedAlignment> stated_alignment(int fd) {
#ifdef STATX_DIOALIGN
  struct statx status{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0) return std::nullopt;
  if ((status.stx_mask & STATX_DIOALIGN) == 0) return std::nullopt;
  return StatedAlignment{status.stx_dio_mem_align, status.stx_dio_offset_align};
#else
  (void)fd;
  return std::nullopt;
#endif
}

// Whether nearly all of the file is cached: the rest is then read from the device, with the kernel's
// read-ahead. It must also be in no danger of eviction: as much memory again is available, so that the
// destination buffers do not displace it.
bool is_cached(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0) return false;
  const auto cached = cached_bytes(fd);
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  if (!cached || *cached < bytes - bytes / 16) return false;
  const auto meminfo = read_text("/proc/meminfo");
  const auto available = meminfo ? meminfo_bytes(*meminfo, "MemAvailable") : std::nullopt;
  return available && *available / 2 >= bytes;  // the file's own pages make up half of it
}

DirectLimits find_limits(FilePair& pair, const Filesystem& filesystem, int flags, DirectPolicy policy) {
  if (policy == DirectPolicy::never) return refuse("buffered I/O was requested (direct=never)");
  if (policy == DirectPolicy::measured_slower)
    return refuse("the page cache was measured as faster here (trunkline tune)");
  const bool may_be_slower = policy == DirectPolicy::always || policy == DirectPolicy::measured_faster;
  if (filesystem.in_memory)
    return refuse("the filesystem keeps files in memory; there is no device for direct I/O");
  if (!may_be_slower && !filesystem.network.empty())
    return refuse(fmt::format("direct I/O is known to be slower on {}; force it with direct=always",
                              filesystem.network));

  if (policy == DirectPolicy::unless_cached && is_cached(pair.buffered.get()))
    return refuse("the page cache holds the file already (direct=unless_cached)");
  const auto stated = stated_alignment(pair.buffered.get());
  if (stated && stated->offset == 0)
    return refuse("the filesystem reports that this file does not support direct I/O (statx)");
  int code = 0;
  UniqueFd direct = reopen_direct(pair.buffered.get(), flags, code);
  if (!direct.valid()) return refuse(fmt::format("opening with O_DIRECT failed: {}", errno_name(code)));
  DirectLimits limits{.usable = true,
                      .memory_alignment = kAssumedAlignment,
                      .offset_alignment = kAssumedAlignment,
                      .why = {}};
  if (stated) {
    limits.memory_alignment = stated->memory == 0 ? 1 : stated->memory;
    limits.offset_alignment = stated->offset;
    limits.why = "the filesystem supports direct I/O and reports its alignment (statx)";
  } else {
    pair.probed = true;
    if (const int refused = probe_read(direct.get()); refused != 0)
      return refuse(fmt::format("a direct read failed: {}", errno_name(refused)));
    limits.why = "direct I/O works; the filesystem reports no alignment, so 4096 is assumed";
  }
  pair.direct = std::move(direct);
  return limits;
}

// open(2) of an existing file, unless the kernel would have to read from a device to look the path up: then
// fails with EAGAIN. Always fails so where there is no such call.
int open_cached(const std::string& path, int flags) {
#ifdef RESOLVE_CACHED
  const open_how how{.flags = static_cast<std::uint64_t>(flags), .mode = 0, .resolve = RESOLVE_CACHED};
  const auto fd = static_cast<int>(::syscall(SYS_openat2, AT_FDCWD, path.c_str(), &how, sizeof how));
  // Before Linux 5.12, or rejected by a container's seccomp filter.
  if (fd < 0 && (errno == ENOSYS || errno == EINVAL || errno == EPERM)) errno = EAGAIN;
  return fd;
#else
  (void)path;
  (void)flags;
  errno = EAGAIN;
  return -1;
#endif
}

// Like O_TRUNC, which leaves block devices alone.
Status empty(int fd, const std::string& path) {
  struct stat status{};
  if (::fstat(fd, &status) == 0 && !S_ISREG(status.st_mode)) return {};
  int code = 0;
  do code = ::ftruncate(fd, 0) == 0 ? 0 : errno;
  while (code == EINTR);
  if (code != 0) return std::unexpected(system_error(code, fmt::format("empty {}", path), path));
  return {};
}

}  // namespace

Result<FilePair> make_pair_of(UniqueFd buffered, const std::string& path, int flags, DirectPolicy policy) {
  struct stat status{};
  if (::fstat(buffered.get(), &status) != 0)
    return std::unexpected(system_error(errno, fmt::format("read the status of {}", path), path));
  if (S_ISDIR(status.st_mode))
    return std::unexpected(system_error(EISDIR, fmt::format("open {}", path), path));
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
    return std::unexpected(make_error(
        ErrorKind::unsupported,
        fmt::format("cannot open {}: it is neither a regular file nor a block device", path), path));
  }
  FilePair pair;
  pair.buffered = std::move(buffered);
  const Filesystem filesystem = filesystem_of(pair.buffered.get());
  pair.in_memory = filesystem.in_memory;
  pair.local = filesystem.local && S_ISREG(status.st_mode);
  pair.limits = find_limits(pair, filesystem, flags, policy);
  if (policy == DirectPolicy::always && !pair.limits.usable) {
    return std::unexpected(make_error(
        ErrorKind::unsupported,
        fmt::format("cannot open {} for direct I/O: {}; open it with direct=auto", path, pair.limits.why),
        path));
  }
  return pair;
}

Result<FilePair> open_pair(const std::string& path, int flags, DirectPolicy policy, mode_t permissions,
                           Lookup lookup) {
  return open_pair(path, flags, [policy](int) { return policy; }, permissions, lookup);
}

Result<FilePair> open_pair(const std::string& path, int flags, const ChoosePolicy& choose, mode_t permissions,
                           Lookup lookup) {
  int fd = -1;
  // O_NONBLOCK: opening a FIFO must not hang before it can be rejected; it has no effect on files and disks.
  const int taken = (flags & ~O_TRUNC) | O_CLOEXEC | O_NONBLOCK;
  do fd = lookup == Lookup::cached ? open_cached(path, taken) : ::open(path.c_str(), taken, permissions);
  while (fd < 0 && errno == EINTR);
  if (fd < 0) {
    const std::string action = "open " + (path.empty() ? "an empty path" : path);
    const bool creates = (flags & O_CREAT) != 0 && !path.empty();
    return std::unexpected(creates ? creation_error(errno, action, path, directory_of(path))
                                   : system_error(errno, action, path));
  }
  ::fcntl(fd, F_SETFL, 0);  // clears O_NONBLOCK: io_uring would return EAGAIN instead of waiting
  auto pair = make_pair_of(UniqueFd(fd), path, flags, choose(fd));
  if (!pair) {
    if ((flags & O_CREAT) != 0 && (flags & O_EXCL) != 0) ::unlink(path.c_str());  // this call created it
    return pair;
  }
  // Only now: a rejected file keeps its contents.
  if ((flags & O_TRUNC) != 0) {
    if (auto emptied = empty(pair->buffered.get(), path); !emptied) return std::unexpected(emptied.error());
  }
  return pair;
}

Result<std::uint64_t> file_bytes(int fd, const std::string& path) {
  struct stat status{};
  if (::fstat(fd, &status) != 0)
    return std::unexpected(system_error(errno, fmt::format("read the size of {}", path), path));
  if (S_ISREG(status.st_mode)) return static_cast<std::uint64_t>(status.st_size);
  const off_t end = ::lseek(fd, 0, SEEK_END);
  if (end < 0) return std::unexpected(system_error(errno, fmt::format("read the size of {}", path), path));
  return static_cast<std::uint64_t>(end);
}

}  // namespace trunkline::os
