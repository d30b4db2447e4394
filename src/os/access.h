// Who may use a file or directory: owner, group, mode and access control list.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <string>

namespace trunkline::os {

inline constexpr const char* kAccessAcl = "system.posix_acl_access";

// An extended attribute of the file open as `fd`; nullopt: there is none, or it cannot be read.
std::optional<std::string> attribute(int fd, const char* name);

// Each copies the access rights of `from` to `to`, which was created with no more than 0700, or with the
// kernel's defaults. `old` is the state of `from`. What this process may not set is left out, and access is
// never widened: where the group cannot be kept, group and others get only what both had; where the access
// control list cannot be kept, they get nothing.
void copy_file_access(int from, const struct stat& old, int to);
void copy_directory_access(int from, int to);

}  // namespace trunkline::os
