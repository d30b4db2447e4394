// Who may use a file or directory: owner, group, mode and access control list.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <string>

namespace trunkline::os {

inline constexpr const char* kAccessAcl = "system.posix_acl_access";

// An extended attribute of what is open as `fd`; none: it has no such one, or it cannot be read.
std::optional<std::string> attribute(int fd, const char* name);

// Each gives what is open as `to`, and was made with no more than 0700 or as the kernel makes new ones, the
// access of what is open as `from`. What this process may not set is left out, and never widens access: where
// the group cannot be kept, group and others get only what both had; where the access control list cannot be
// kept, they get nothing. `old` is the state of `from`.
void copy_file_access(int from, const struct stat& old, int to);
void copy_directory_access(int from, int to);

}  // namespace trunkline::os
