// Whether a path still leads to what was opened under it.
#pragma once

#include <string>

#include "trunkline/error.h"

namespace trunkline::os {

// Fails where `path` does not lead to the file or directory that is open as `fd` (O_PATH will do): with
// system and ESTALE where something else is there by now (a copy that took its place, another filesystem),
// else with what stat(2) reports. Filesystems on which one file may have several inode numbers are not looked
// at.
Status check_leads_to(const std::string& path, int fd);

// Whether programs, or other systems, make up the inode numbers of the filesystem (FUSE, CIFS), so that a
// file may have another one after each mount, or after a rename. Also where nothing is known of it.
bool has_passing_inodes(int fd);
bool has_passing_inodes(const std::string& path);

}  // namespace trunkline::os
