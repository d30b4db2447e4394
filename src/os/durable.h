// Small files that survive a power failure.
#pragma once

#include <cerrno>
#include <string>
#include <string_view>

#include "trunkline/error.h"

namespace trunkline::os {

// Whether this error of renameat2(2) may come from its flags: NFS and others do not support them (EINVAL),
// nor do old kernels (ENOSYS) and the seccomp profiles of old container runtimes (EPERM).
inline bool may_lack_rename_flags(int code) { return code == EINVAL || code == ENOSYS || code == EPERM; }

enum class IfPresent { replace, fail };

// Writes `contents` to `path`, replacing an existing file. Readers, and a crash at any time, see either the
// complete old file or the complete new one. On failure the old file is still in place (unless only the last
// step failed: then it is unknown which of the two survives a power failure) and no temporary file remains.
// With IfPresent::fail an existing `path` is left alone: system (EEXIST), decided atomically by the
// filesystem. The new file inherits mode, owner, group and extended attributes of the file that it replaces,
// which this process must be allowed to write (os/replaced_file.h).
Status write_file_durably(const std::string& path, std::string_view contents,
                          IfPresent if_present = IfPresent::replace);

// The same without the last step: returns the directory whose fsync_directory() makes the name durable.
// `access_of`: see os/replacement_file.h.
Result<std::string> write_synced_file(const std::string& path, std::string_view contents,
                                      IfPresent if_present, const std::string& access_of = {});

// The directory that holds `path`; "." for a plain name.
std::string directory_of(const std::string& path);

// Makes names that were created, renamed or removed in a directory durable.
Status fsync_directory(const std::string& path);

}  // namespace trunkline::os
