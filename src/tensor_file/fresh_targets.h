// The new memory that blocks are read into: made resident ahead of the reads, by several threads at once.
// Otherwise the kernel would provide it one page at a time, while the device or a copy waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "mem/fresh_pages.h"
#include "tensor_file/block_plan.h"

namespace trunkline::tensor_file {

// Guarded by its owner's lock, except add_block() before it is shared, and populate().
class FreshTargets {
 public:
  // In the order in which the blocks are read.
  void add_block(const FileLayout& layout, const Block& block);

  // Whether the memory of block `index` is resident, or was never new.
  bool is_ready(std::size_t index) const { return states_[index] == State::ready; }

  // The first block whose memory nobody has claimed yet; end() if there is none.
  std::size_t first_unclaimed();
  std::size_t end() const { return states_.size(); }

  // Whether the caller is to populate the memory of the block and then call set_ready(); false if another
  // thread does or did.
  bool claim(std::size_t index);
  void populate(std::size_t index);
  void set_ready(std::size_t index) { states_[index] = State::ready; }

 private:
  enum class State : std::uint8_t { untouched, claimed, ready };
  struct Range {
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    FreshMapping* mapping = nullptr;
  };

  std::vector<State> states_;
  std::vector<std::size_t> first_range_{0};  // of each block, in ranges_; then the number of ranges
  std::vector<Range> ranges_;
  std::unordered_map<const Extent*, FreshMapping> mappings_;
  std::size_t unclaimed_from_ = 0;
};

}  // namespace trunkline::tensor_file
