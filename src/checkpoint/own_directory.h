// Whether a directory is one of checkpoints, or may become one. Reading only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "trunkline/error.h"

namespace trunkline::checkpoint {

// The device (st_dev) that the directory lies on; nothing where there is no directory. Fails with system
// (ENOTDIR) for another kind of file, and for a symbolic link that leads nowhere: its disk may not be
// mounted, and the checkpoints be there once it is.
Result<std::optional<std::uint64_t>> device_of_directory(const std::string& directory);

// The device under the part of a path that exists: of the filesystem that would hold the rest.
std::optional<std::uint64_t> device_under(const std::string& path);

// Whether the directory holds a checkpoint of torch.distributed.checkpoint, of trunkline.dcp or of torch.
bool is_of_dcp(const std::string& directory);

// Whether the directory of a step holds files, and none that a save makes: other programs name theirs so too.
bool is_foreign_step(const std::string& step_directory);

// Fails with system (ENOTEMPTY) where a record says that the directory holds the shards of another one, which
// has its manifests: here they would count as debris.
Status check_not_a_volume(const std::string& directory);

// Whether the directory has a descriptor, or steps with manifests. Shards alone may be what another one has
// on a volume, and an empty step may be of any program.
Result<bool> has_checkpoints(const std::string& directory);

// What to do about a directory that is not one of checkpoints, though it may have something to do with them.
std::string advice_for(const std::string& directory);

// Fails with system (ENOTEMPTY) where the directory holds what others have put there and nothing of a
// directory of checkpoints. Hidden files, lost+found, our lock and folders of runs that were set aside do
// not count.
Status check_not_foreign(const std::string& directory);

}  // namespace trunkline::checkpoint
