#include "tensor_file/fresh_targets.h"

#include <algorithm>

#include "base/trace.h"

namespace trunkline::tensor_file {
namespace {

constexpr trace::Kind kPopulate{"populate new memory", trace::Category::copy, trace::Kind::Fields::bytes};

}  // namespace

void FreshTargets::add_block(const FileLayout& layout, const Block& block) {
  for (const Extent& extent : extents_in(layout, block.offset, block.end())) {
    if (!extent.fresh || !is_host(extent.memory)) continue;
    FreshMapping& mapping = mappings_[&extent];
    mapping.data = extent.memory.data;
    mapping.bytes = extent.memory.bytes;
    const std::uint64_t begin = std::max(block.offset, extent.offset);
    const std::uint64_t end = std::min(block.end(), extent.end());
    ranges_.push_back(
        {.data = mapping.data + (begin - extent.offset), .bytes = end - begin, .mapping = &mapping});
  }
  states_.push_back(ranges_.size() == first_range_.back() ? State::ready : State::untouched);
  first_range_.push_back(ranges_.size());
}

std::size_t FreshTargets::first_unclaimed() {
  while (unclaimed_from_ < end() && states_[unclaimed_from_] != State::untouched) ++unclaimed_from_;
  return unclaimed_from_;
}

bool FreshTargets::claim(std::size_t index) {
  if (states_[index] != State::untouched) return false;
  states_[index] = State::claimed;
  return true;
}

void FreshTargets::populate(std::size_t index) {
  std::uint64_t bytes = 0;
  for (std::size_t i = first_range_[index]; i < first_range_[index + 1]; ++i) bytes += ranges_[i].bytes;
  const trace::Span span(kPopulate, {}, bytes);
  for (std::size_t i = first_range_[index]; i < first_range_[index + 1]; ++i)
    populate_pages(ranges_[i].data, ranges_[i].bytes, *ranges_[i].mapping);
}

}  // namespace trunkline::tensor_file
