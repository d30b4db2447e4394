#include "os/allocation.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#ifndef XFS_SUPER_MAGIC
#define XFS_SUPER_MAGIC 0x58465342  // not in <linux/magic.h> before Linux 5.4
#endif

namespace trunkline::os {
namespace {

constexpr std::uint64_t kStatBlockBytes = 512;  // the unit of st_blocks

int allocate_with_mode(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) {
  int result = 0;
  do result = ::fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

// Whether the filesystem keeps the blocks that it allocated before it ran out of them. Other filesystems
// release them, or their free space does not show what fits (compression, several devices).
bool keeps_failed_allocations(int fd) {
  struct statfs filesystem{};
  if (::fstatfs(fd, &filesystem) != 0) return false;
  const auto type = static_cast<std::uint32_t>(filesystem.f_type);
  return type == EXT4_SUPER_MAGIC || type == XFS_SUPER_MAGIC;
}

// Whether the part of the range past the end of the file exceeds the free space. Holes before the end are not
// counted: finding them takes many system calls.
bool exceeds_free_space(int fd, std::uint64_t offset, std::uint64_t bytes) {
  struct stat file{};
  struct statvfs space{};
  if (::fstat(fd, &file) != 0 || ::fstatvfs(fd, &space) != 0) return false;
  const auto length = static_cast<std::uint64_t>(file.st_size);
  const std::uint64_t end = offset + bytes;
  if (end <= length) return false;
  const std::uint64_t free_blocks = ::geteuid() == 0 ? space.f_bfree : space.f_bavail;
  // An earlier allocation may have left blocks past the end: they do not count as free, but are reused.
  const std::uint64_t allocated = static_cast<std::uint64_t>(file.st_blocks) * kStatBlockBytes;
  const std::uint64_t behind_end = allocated > length ? allocated - length : 0;
  return end - std::max(offset, length) > free_blocks * space.f_frsize + behind_end;
}

bool exceeds_file_size_limit(std::uint64_t end) {
  struct rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && end > limit.rlim_cur;
}

}  // namespace

int allocate(int fd, std::uint64_t offset, std::uint64_t bytes) {
  return allocate_with_mode(fd, 0, offset, bytes);
}

int allocate_or_keep_length(int fd, std::uint64_t offset, std::uint64_t bytes) {
  if (keeps_failed_allocations(fd) && exceeds_free_space(fd, offset, bytes)) return ENOSPC;
  // RLIMIT_FSIZE limits lengths only: allocate() checks it before it allocates anything, but KEEP_SIZE
  // ignores it.
  if (!exceeds_file_size_limit(offset + bytes)) {
    const int code = allocate_with_mode(fd, FALLOC_FL_KEEP_SIZE, offset, bytes);
    if (code != 0) return code;
  }
  // The blocks are allocated. This sets the length, so that parallel direct writes need not extend the file
  // one after the other.
  return allocate(fd, offset, bytes);
}

}  // namespace trunkline::os
