// Checksums of ranges whose pieces are summed on several threads: each block brings the checksums of its
// pieces, and they are put together in the order of the file.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor_file/file_layout.h"

namespace trunkline::tensor_file {

// The checksum of some bytes of one Checksum's range.
struct PartialChecksum {
  std::uint32_t checksum = 0;  // index in FileLayout::checksums
  std::uint32_t value = 0;
  std::uint64_t bytes = 0;
};

// Checksums of one block, in the order of the file.
class BlockChecksums {
 public:
  explicit BlockChecksums(const FileLayout& layout) : layout_(layout) {}
  // The next bytes, which `checksum` covers (nullptr: none does); they are copied to `copy_to` as well
  // (nullptr: nowhere), in the same pass.
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

  // The checksums of block `index` are known. Folds as far as there is no gap, and returns the indices of
  // checksums that were completed by it.
  std::vector<std::uint32_t> add(std::size_t index, std::vector<PartialChecksum> parts);

  // Blocks folded so far, from the first on without a gap.
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
