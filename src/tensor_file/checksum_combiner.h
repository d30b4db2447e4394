// Checksums of ranges whose pieces are processed by several threads: each block contributes the checksums of
// its pieces, which are combined in file order.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor_file/file_layout.h"

namespace trunkline::tensor_file {

// The checksum of part of one Checksum's range.
struct PartialChecksum {
  std::uint32_t checksum = 0;  // index in FileLayout::checksums
  std::uint32_t value = 0;
  std::uint64_t bytes = 0;
};

// The checksums of one block, in file order.
class BlockChecksums {
 public:
  explicit BlockChecksums(const FileLayout& layout) : layout_(layout) {}
  // Adds the next bytes, which `checksum` covers (nullptr: none does), and copies them to `copy_to` (nullptr:
  // nowhere) in the same pass.
  void add(const Checksum* checksum, std::span<const std::byte> bytes, std::byte* copy_to);
  std::vector<PartialChecksum> take() { return std::move(parts_); }

 private:
  const FileLayout& layout_;
  std::vector<PartialChecksum> parts_;
};

// Not synchronised.
class ChecksumCombiner {
 public:
  ChecksumCombiner(const FileLayout& layout, std::size_t blocks)
      : layout_(layout),
        pending_(blocks),
        values_(layout.checksums.size()),
        done_bytes_(layout.checksums.size()) {}

  // Adds the checksums of block `index`. Combines blocks as far as there is no gap, and returns the indices
  // of checksums that this completed.
  std::vector<std::uint32_t> add(std::size_t index, std::vector<PartialChecksum> parts);

  // How many blocks are combined so far, from the first on without a gap.
  std::size_t folded() const { return folded_; }
  std::uint32_t value(std::uint32_t checksum) const { return values_[checksum]; }
  const std::vector<std::uint32_t>& values() const { return values_; }

 private:
  struct Pending {
    bool known = false;
    std::vector<PartialChecksum> parts;
  };

  const FileLayout& layout_;
  std::vector<Pending> pending_;
  std::vector<std::uint32_t> values_;
  std::vector<std::uint64_t> done_bytes_;
  std::size_t folded_ = 0;
};

}  // namespace trunkline::tensor_file
