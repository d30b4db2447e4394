// How a layout is cut into blocks, each of which is transferred as a whole: either between the file and the
// memory of one extent, or through a staging block that combines pieces of several extents. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "tensor_file/file_layout.h"

namespace trunkline::tensor_file {

struct Block {
  std::uint64_t offset = 0;  // in the file
  std::uint64_t bytes = 0;
  const Extent* direct = nullptr;  // the one extent that contains all of it; nullptr: staged

  std::uint64_t end() const { return offset + bytes; }
};

struct BlockRules {
  std::uint64_t block_bytes = 4ULL << 20;
  // Whether a block may be transferred without a copy, and from which addresses (multiples of this many
  // bytes).
  bool allow_direct = false;
  std::uint64_t memory_alignment = 1;
  // Staged blocks may omit bytes that no extent and no checksum needs.
  bool skip_gaps = false;
};

// Direct blocks begin and end at multiples of this in the file, so that direct and staged blocks never share
// a page.
inline constexpr std::uint64_t kDirectGranularity = 4096;
// The most direct blocks in flight: enough to keep every lane busy, few enough for a quick cancel.
inline constexpr std::size_t kMostDirect = 16;
// An extent with fewer directly transferable bytes than this shares a staged block with its neighbours
// instead.
inline constexpr std::uint64_t kLeastDirectBytes = 1ULL << 20;

// Staged blocks read smaller gaps than this rather than end: a command costs about as much as so many bytes.
inline constexpr std::uint64_t kLargestReadGap = 64ULL << 10;

// In file order; together they cover the file, or with skip_gaps all that is needed. Offsets of blocks are
// multiples of kDirectGranularity.
std::vector<Block> cut_into_blocks(const FileLayout& layout, const BlockRules& rules);

// Contiguous bytes of one extent (or of none) and of one checksum (or of none).
struct Segment {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  const Extent* extent = nullptr;
  const Checksum* checksum = nullptr;
};

// Calls `visit` for [begin, end) cut at the boundaries of extents and checksums, in order.
void for_each_segment(const FileLayout& layout, std::uint64_t begin, std::uint64_t end,
                      const std::function<void(const Segment&)>& visit);

}  // namespace trunkline::tensor_file
