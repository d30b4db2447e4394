// The blocks of several images in the order in which they are moved: in turns, so that files on different
// disks are all under way at once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensor_file/block_plan.h"

namespace trunkline::tensor_file {

struct BlockPlace {
  std::size_t image = 0;
  std::size_t block = 0;  // within the image
};

inline std::vector<BlockPlace> in_turns(const std::vector<std::vector<Block>>& blocks_of_images) {
  std::vector<BlockPlace> order;
  std::size_t longest = 0;
  std::size_t total = 0;
  for (const auto& blocks : blocks_of_images) {
    longest = std::max(longest, blocks.size());
    total += blocks.size();
  }
  order.reserve(total);
  for (std::size_t block = 0; block < longest; ++block) {
    for (std::size_t image = 0; image < blocks_of_images.size(); ++image) {
      if (block < blocks_of_images[image].size()) order.push_back({image, block});
    }
  }
  return order;
}

}  // namespace trunkline::tensor_file
