// How an layout is cut into blocks, each of which is moved as a whole: either between the file and the memory
// of one extent, or through a staging block in which pieces of several extents meet. Pure functions.
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
  const Extent* direct = nullptr;  // the one extent that holds all of it; nullptr: staged

  std::uint64_t end() const { return offset + bytes; }
};

struct BlockRules {
  std::uint64_t block_bytes = 4ULL << 20;
  // Whether, and from which addresses (multiples of this many bytes), a block may move without a copy.
  bool allow_direct = false;
  std::uint64_t memory_alignment = 1;
  // Staged blocks may leave out what no extent and no checksum asks for.
  bool skip_gaps = false;
};

// Direct blocks begin and end at multiples of this in the file, so that no page is shared by two ways.
inline constexpr std::uint64_t kDirectGranularity = 4096;
// Direct blocks under way at once: enough for every lane to be busy, few enough for a cancel to be quick.
inline constexpr std::size_t kMostDirect = 16;
// An extent with less than this that could move directly joins its neighbours in a staged block instead.
inline constexpr std::uint64_t kLeastDirectBytes = 1ULL << 20;

// In the order of the file; together they cover it, or with skip_gaps what is asked for. Offsets of blocks
// are multiples of kDirectGranularity.
std::vector<Block> cut_into_blocks(const FileLayout& layout, const BlockRules& rules);

// Contiguous bytes of one extent (or of none) and of one checksum (or of none).
struct Segment {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  const Extent* extent = nullptr;
  const Checksum* checksum = nullptr;
};

// Calls `visit` for [begin, end) cut at the borders of extents and checksums, in order.
void for_each_segment(const FileLayout& layout, std::uint64_t begin, std::uint64_t end,
                      const std::function<void(const Segment&)>& visit);

}  // namespace trunkline::tensor_file
