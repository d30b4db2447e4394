// One file under two descriptors: one through the page cache, and, where the filesystem supports it, one that
// bypasses it (O_DIRECT).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>

#include "os/unique_fd.h"
#include "trunkline/error.h"

namespace trunkline::os {

enum class DirectPolicy {
  automatic,
  always,
  never,
  unless_cached,
  measured_faster,  // like automatic, but also where direct I/O is usually slower
  measured_slower,  // like never
};

// What direct I/O on a file requires, and whether it is used at all.
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
  bool in_memory = false;  // tmpfs, ramfs, memfd: not backed by a device
  // A regular file of a local filesystem (os/local_filesystem.h): getting its size and closing it wait for no
  // server.
  bool local = false;
  bool probed = false;  // opening it took a read, to find out whether direct I/O works
};

enum class Lookup { any, cached };

// open(2) with `flags` (O_CLOEXEC is added), for regular files and block devices; everything else is rejected
// as unsupported. With Lookup::cached, for a file that exists: fails with EAGAIN where the kernel would have
// to wait for a device to look the path up, or cannot tell.
Result<FilePair> open_pair(const std::string& path, int flags, DirectPolicy policy, mode_t permissions = 0666,
                           Lookup lookup = Lookup::any);

// Decides by the file, which is open already.
using ChoosePolicy = std::function<DirectPolicy(int fd)>;
Result<FilePair> open_pair(const std::string& path, int flags, const ChoosePolicy& choose,
                           mode_t permissions = 0666, Lookup lookup = Lookup::any);

// Pairs a descriptor that is already open, for example a memfd. `path` is for errors.
Result<FilePair> make_pair_of(UniqueFd buffered, const std::string& path, int flags, DirectPolicy policy);

// The size of a regular file or a block device.
Result<std::uint64_t> file_bytes(int fd, const std::string& path);

}  // namespace trunkline::os
