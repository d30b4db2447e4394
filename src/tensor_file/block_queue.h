// The blocks of several layouts in the order in which they are transferred: round robin, so that files on
// different disks are all in flight at once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensor_file/block_plan.h"

namespace trunkline::tensor_file {

struct BlockPlace {
  std::size_t layout = 0;
  std::size_t block = 0;  // within the layout
};

inline std::vector<BlockPlace> in_turns(const std::vector<std::vector<Block>>& blocks_of_layouts) {
  std::vector<BlockPlace> order;
  std::size_t longest = 0;
  std::size_t total = 0;
  for (const auto& blocks : blocks_of_layouts) {
    longest = std::max(longest, blocks.size());
    total += blocks.size();
  }
  order.reserve(total);
  for (std::size_t block = 0; block < longest; ++block) {
    for (std::size_t layout = 0; layout < blocks_of_layouts.size(); ++layout) {
      if (block < blocks_of_layouts[layout].size()) order.push_back({layout, block});
    }
  }
  return order;
}

}  // namespace trunkline::tensor_file
