// Whether a rename may replace or move what has a name, found out before anything is written.
#pragma once

#include <string>

#include "trunkline/error.h"

namespace trunkline::os {

// A file that may be written may still be one that no rename can replace. A save that finds that out at its
// end has written everything for nothing. Fails with system:
//
// - EBUSY: `path` is a mount point, as a file that a container runtime binds by itself.
// - EPERM: the directory is sticky (/tmp) and the file is another user's, or the directory is append-only,
//   in which not even the temporary file could be removed.
//
// `path` is a file, a directory that is to be moved, or free. `action` begins the message ("saving to
// /data/a.bin"). What cannot be found out is not an error: the rename will tell.
Status check_replaceable(const std::string& path, const std::string& action);

}  // namespace trunkline::os
