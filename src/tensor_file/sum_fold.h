// Checksums of ranges whose pieces are summed on several threads: each block brings the sums of its pieces,
// and they are put together in the order of the file.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor_file/image.h"

namespace trunkline::tensor_file {

// The checksum of some bytes of one Sum's range.
struct PartialSum {
  std::uint32_t sum = 0;  // index in Image::sums
  std::uint32_t value = 0;
  std::uint64_t bytes = 0;
};

// Sums of one block, in the order of the file.
class BlockSums {
 public:
  explicit BlockSums(const Image& image) : image_(image) {}
  // The next bytes, which `sum` covers (nullptr: none does); they are copied to `copy_to` as well (nullptr:
  // nowhere), in the same pass.
  void add(const Sum* sum, std::span<const std::byte> bytes, std::byte* copy_to);
  std::vector<PartialSum> take() { return std::move(parts_); }

 private:
  const Image& image_;
  std::vector<PartialSum> parts_;
};

// Not synchronised.
class SumFold {
 public:
  SumFold(const Image& image, std::size_t blocks)
      : image_(image), pending_(blocks), values_(image.sums.size()), done_bytes_(image.sums.size()) {}

  // The sums of block `index` are known. Folds as far as there is no gap, and returns the indices of sums
  // that were completed by it.
  std::vector<std::uint32_t> add(std::size_t index, std::vector<PartialSum> parts);

  // Blocks folded so far, from the first on without a gap.
  std::size_t folded() const { return folded_; }
  std::uint32_t value(std::uint32_t sum) const { return values_[sum]; }
  const std::vector<std::uint32_t>& values() const { return values_; }

 private:
  struct Pending {
    bool known = false;
    std::vector<PartialSum> parts;
  };

  const Image& image_;
  std::vector<Pending> pending_;
  std::vector<std::uint32_t> values_;
  std::vector<std::uint64_t> done_bytes_;
  std::size_t folded_ = 0;
};

}  // namespace trunkline::tensor_file
