#include "tensor_file/block_plan.h"

#include <algorithm>
#include <iterator>

namespace trunkline::tensor_file {
namespace {

std::uint64_t round_up(std::uint64_t value) {
  return (value + kDirectGranularity - 1) / kDirectGranularity * kDirectGranularity;
}
std::uint64_t round_down(std::uint64_t value) { return value / kDirectGranularity * kDirectGranularity; }

class Cutter {
 public:
  Cutter(const FileLayout& layout, const BlockRules& rules) : layout_(layout), rules_(rules) {}

  std::vector<Block> cut() {
    for (const Extent& extent : layout_.extents) {
      if (!can_be_direct(extent)) continue;
      const std::uint64_t begin = round_up(extent.offset);
      // The file's last bytes may be less than a page.
      const std::uint64_t end = round_down(extent.end());
      if (end < begin + kLeastDirectBytes || touches_checksum_field(begin, end)) continue;
      stage(done_, begin);
      for (std::uint64_t at = begin; at < end; at += rules_.block_bytes) {
        blocks_.push_back({.offset = at, .bytes = std::min(rules_.block_bytes, end - at), .direct = &extent});
      }
      done_ = end;
    }
    stage(done_, layout_.bytes);
    return std::move(blocks_);
  }

 private:
  bool can_be_direct(const Extent& extent) const {
    if (!rules_.allow_direct || !is_host(extent.memory)) return false;
    const auto address = reinterpret_cast<std::uintptr_t>(extent.memory.data);
    return (address + round_up(extent.offset) - extent.offset) % rules_.memory_alignment == 0;
  }

  bool touches_checksum_field(std::uint64_t begin, std::uint64_t end) const {
    return !checksum_fields_in(layout_, begin, end).empty();
  }

  void stage(std::uint64_t begin, std::uint64_t end) {
    while (begin < end) {
      if (rules_.skip_gaps) {
        const std::uint64_t next = next_wanted(begin);
        if (next >= end) return;
        begin = std::max(begin, round_down(next));
      }
      std::uint64_t stop = std::min(end, begin + rules_.block_bytes);
      if (rules_.skip_gaps) stop = std::min(stop, round_up(end_of_run(begin, stop)));
      blocks_.push_back({.offset = begin, .bytes = stop - begin});
      begin = stop;
    }
  }

  // The first byte at or after `from` that an extent or a checksum needs.
  std::uint64_t next_wanted(std::uint64_t from) const {
    std::uint64_t next = layout_.bytes;
    const auto extent = std::partition_point(layout_.extents.begin(), layout_.extents.end(),
                                             [&](const Extent& each) { return each.end() <= from; });
    if (extent != layout_.extents.end()) next = std::max(from, extent->offset);
    const auto checksum = std::partition_point(layout_.checksums.begin(), layout_.checksums.end(),
                                               [&](const Checksum& each) { return each.end <= from; });
    if (checksum != layout_.checksums.end()) next = std::min(next, std::max(from, checksum->begin));
    return next;
  }

  // Where a block that begins at `begin`, and ends at `end` at most, has no more bytes that an extent or a
  // checksum needs, or comes to a gap that is not worth reading.
  std::uint64_t end_of_run(std::uint64_t begin, std::uint64_t end) const {
    auto extent = std::partition_point(layout_.extents.begin(), layout_.extents.end(),
                                       [&](const Extent& each) { return each.end() <= begin; });
    auto checksum = std::partition_point(layout_.checksums.begin(), layout_.checksums.end(),
                                         [&](const Checksum& each) { return each.end <= begin; });
    std::uint64_t last = begin;
    while (last < end) {
      const std::uint64_t reached = std::min(end, last + kLargestReadGap + 1);
      if (extent != layout_.extents.end() && extent->offset < reached)
        last = std::max(last, (extent++)->end());
      else if (checksum != layout_.checksums.end() && checksum->begin < reached)
        last = std::max(last, (checksum++)->end);
      else
        break;
    }
    return std::min(last, end);
  }

  const FileLayout& layout_;
  const BlockRules& rules_;
  std::uint64_t done_ = 0;
  std::vector<Block> blocks_;
};

}  // namespace

std::vector<Block> cut_into_blocks(const FileLayout& layout, const BlockRules& rules) {
  return Cutter(layout, rules).cut();
}

void for_each_segment(const FileLayout& layout, std::uint64_t begin, std::uint64_t end,
                      const std::function<void(const Segment&)>& visit) {
  auto extent = std::partition_point(layout.extents.begin(), layout.extents.end(),
                                     [&](const Extent& each) { return each.end() <= begin; });
  auto checksum = std::partition_point(layout.checksums.begin(), layout.checksums.end(),
                                       [&](const Checksum& each) { return each.end <= begin; });
  while (begin < end) {
    std::uint64_t stop = end;
    Segment segment{.offset = begin};
    while (extent != layout.extents.end() && extent->end() <= begin) ++extent;
    while (checksum != layout.checksums.end() && checksum->end <= begin) ++checksum;
    if (extent != layout.extents.end()) {
      const bool inside = extent->offset <= begin;
      stop = std::min(stop, inside ? extent->end() : extent->offset);
      if (inside) segment.extent = &*extent;
    }
    if (checksum != layout.checksums.end()) {
      const bool inside = checksum->begin <= begin;
      stop = std::min(stop, inside ? checksum->end : checksum->begin);
      if (inside) segment.checksum = &*checksum;
    }
    segment.bytes = stop - begin;
    visit(segment);
    begin = stop;
  }
}

}  // namespace trunkline::tensor_file
