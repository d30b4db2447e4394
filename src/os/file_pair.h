// One file under two descriptors: through the page cache, and, where the filesystem takes it, past it
// (O_DIRECT).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "os/unique_fd.h"
#include "trunkline/error.h"

namespace trunkline::os {

enum class DirectPolicy { automatic, always, never, unless_cached };

// What direct I/O on a file asks for, and whether it is used at all.
struct DirectLimits {
  bool usable = false;
  std::uint64_t memory_alignment = 1;  // bytes, of addresses
  std::uint64_t offset_alignment = 1;  // bytes, of offsets and lengths
  std::string why;                     // why it is used or not, a phrase
};

struct FilePair {
  UniqueFd buffered;
  UniqueFd direct;  // valid exactly when limits.usable
  DirectLimits limits;
  bool in_memory = false;  // tmpfs, ramfs, memfd: there is no device behind it
  // A regular file of a local filesystem (os/local_filesystem.h): its size and its closing wait for nobody.
  bool local = false;
  bool probed = false;  // opening it took a read, to find out about direct I/O
};

enum class Lookup { any, cached };

// open(2) with `flags` (O_CLOEXEC is added), for regular files and block devices; others are refused as
// unsupported. With Lookup::cached, for a file that exists: fails with EAGAIN where the kernel would wait for
// a device to look the path up, or cannot tell.
Result<FilePair> open_pair(const std::string& path, int flags, DirectPolicy policy, mode_t permissions = 0666,
                           Lookup lookup = Lookup::any);

// Pairs a descriptor that is open already, for example a memfd. `path` is for errors.
Result<FilePair> make_pair_of(UniqueFd buffered, const std::string& path, int flags, DirectPolicy policy);

// Bytes in a regular file or a block device.
Result<std::uint64_t> file_bytes(int fd, const std::string& path);

}  // namespace trunkline::os
