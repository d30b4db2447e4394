// Which filesystems and devices paths are on.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "trunkline/error.h"
#include "tuning/tuning.h"

namespace trunkline::tuning {

// For an existing file or directory, or for the directory that would hold `path`.
Result<Storage> storage_of(const std::string& path);

// Of all `paths`: sorted, none twice.
Result<std::vector<Storage>> storages_of(std::span<const std::string> paths);

}  // namespace trunkline::tuning
