// Checks, before anything is written, whether a rename can replace or move a path.
#pragma once

#include <string>

#include "trunkline/error.h"

namespace trunkline::os {

// A writable file may still be one that no rename can replace. A save that finds that out at its end has
// written everything in vain. Fails with system:
//
// - EBUSY: `path` is a mount point, such as a single file that a container runtime bind-mounts.
// - EPERM: the directory is sticky (/tmp) and the file is another user's, or the directory is append-only, so
//   that not even the temporary file could be removed.
//
// `path` is a file, a directory that is to be moved, or does not exist. `action` is what the message says
// that cannot be done ("save to /data/a.bin"). A check that cannot be made is not an error: the rename will
// show.
Status check_replaceable(const std::string& path, const std::string& action);

}  // namespace trunkline::os
