// Whether a directory is a directory of checkpoints, or may become one. Only reads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "trunkline/error.h"

namespace trunkline::checkpoint {

// The device (st_dev) of the directory; nullopt where there is no directory. Fails with system (ENOTDIR) for
// another kind of file, and for a dangling symbolic link: its disk may not be mounted, and have checkpoints.
Result<std::optional<std::uint64_t>> device_of_directory(const std::string& directory);

// The device of the existing part of a path: that of the filesystem that would hold the rest.
std::optional<std::uint64_t> device_under(const std::string& path);

// Whether the directory holds a checkpoint of torch.distributed.checkpoint, saved by trunkline.dcp or by
// torch.
bool is_of_dcp(const std::string& directory);

// Whether a step's directory holds files, but none that a save creates: other programs use such names too.
bool is_foreign_step(const std::string& step_directory);

// Fails with system (ENOTEMPTY) where a record says that the directory holds the shards of another one, which
// has their manifests: here they would count as debris.
Status check_not_a_volume(const std::string& directory);

// Whether the directory has a descriptor, or steps with manifests. Shards alone may be those of another
// directory on a volume, and an empty step may belong to any program.
Result<bool> has_checkpoints(const std::string& directory);

// What to do about a directory that is not a directory of checkpoints but may be related to one.
std::string advice_for(const std::string& directory);

// Fails with system (ENOTEMPTY) where the directory holds other files, and nothing of a directory of
// checkpoints. Hidden files, lost+found, our lock and folders of runs that were set aside do not count.
Status check_not_foreign(const std::string& directory);

}  // namespace trunkline::checkpoint
