// Whether two files are the same, and whether a path still leads to the file that was opened under it.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>

#include "trunkline/error.h"

namespace trunkline::os {

// Whether both describe one file: exact, and so wrong where has_unstable_inodes(), which check_leads_to()
// allows for.
bool is_same_file(const struct stat& one, const struct stat& other);

// Fails where `path` does not lead to the file or directory that is open as `fd` (O_PATH suffices): with
// system and ESTALE where something else has replaced it (a copy, another filesystem), else with the error of
// stat(2). Filesystems on which one file may have several inode numbers are not checked.
Status check_leads_to(const std::string& path, int fd);

// Whether programs, or other systems, make up the filesystem's inode numbers (FUSE, CIFS), so that a file may
// get another one after each mount, or after a rename. Also true where nothing is known about the filesystem.
bool has_unstable_inodes(int fd);
bool has_unstable_inodes(const std::string& path);

// When the file or directory that `path` leads to was made, in nanoseconds; 0: not known.
std::uint64_t birth_of(const std::string& path);

// A number that the directory that `path` leads to keeps, and that a copy of it does not have: its inode
// number plus its time of birth, modulo 2^64, since filesystems use inode numbers again at once. 0 where
// has_unstable_inodes(). Fails with the error of stat(2).
Result<std::uint64_t> directory_identity(const std::string& path);

}  // namespace trunkline::os
