// Small files that survive a power failure.
#pragma once

#include <cerrno>
#include <string>
#include <string_view>

#include "trunkline/error.h"

namespace trunkline::os {

// Whether this error of renameat2(2) may be about its flags, which NFS and others do not know (EINVAL), nor
// old kernels (ENOSYS) and the seccomp profiles of old container runtimes (EPERM).
inline bool may_lack_rename_flags(int code) { return code == EINVAL || code == ENOSYS || code == EPERM; }

enum class IfPresent { replace, fail };

// Writes `contents` to `path`, replacing what is there: a reader, and a crash at any time, sees the old file
// or the new one, whole. On failure the old file is still in place (unless only the last step failed: then it
// is unknown which of the two a power failure leaves) and no temporary file stays. With IfPresent::fail an
// existing `path` is left alone: system (EEXIST), decided by the filesystem in one step. A file that is
// replaced passes its mode, owner, group and extended attributes on, and must be one that this process may
// write (os/replaced_file.h).
Status write_file_durably(const std::string& path, std::string_view contents,
                          IfPresent if_present = IfPresent::replace);

// The same but for the last step: returns the directory whose fsync_directory() makes the name durable.
Result<std::string> write_synced_file(const std::string& path, std::string_view contents,
                                      IfPresent if_present);

// The directory that holds `path`; "." for a plain name.
std::string directory_of(const std::string& path);

// Makes names that were created, renamed or removed in a directory durable.
Status fsync_directory(const std::string& path);

}  // namespace trunkline::os
