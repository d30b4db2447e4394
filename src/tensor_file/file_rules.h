// What an open file requires of blocks that are transferred without a copy.
#pragma once

#include <algorithm>

#include "io/file/file_core.h"
#include "mem/staging_pool.h"
#include "tensor_file/block_plan.h"
#include "trunkline/file.h"

namespace trunkline::tensor_file {

inline BlockRules rules_for(const File& file) {
  BlockRules rules{.block_bytes = StagingPool::kBlockBytes, .allow_direct = true};
  for (const io::Member& member : file.core()->members) {
    if (!member.pair.limits.usable) continue;  // the page cache accepts any address
    rules.memory_alignment = std::max(rules.memory_alignment, member.pair.limits.memory_alignment);
  }
  return rules;
}

}  // namespace trunkline::tensor_file
