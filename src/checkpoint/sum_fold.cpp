#include "checkpoint/sum_fold.h"

#include <utility>

#include "trunkline/checksum.h"

namespace trunkline::checkpoint {

void BlockSums::add(const Sum& sum, std::span<const std::byte> bytes) {
  const auto index = static_cast<std::uint32_t>(&sum - image_.sums.data());
  if (parts_.empty() || parts_.back().sum != index) parts_.push_back({.sum = index});
  PartialSum& part = parts_.back();
  part.value = sum.kind == SumKind::crc32 ? crc32(bytes, part.value) : crc32c(bytes, part.value);
  part.bytes += bytes.size();
}

std::vector<std::uint32_t> SumFold::add(std::size_t index, std::vector<PartialSum> parts) {
  pending_[index] = {.known = true, .parts = std::move(parts)};
  std::vector<std::uint32_t> completed;
  for (; folded_ < pending_.size() && pending_[folded_].known; ++folded_) {
    for (const PartialSum& part : std::exchange(pending_[folded_].parts, {})) {
      const Sum& sum = image_.sums[part.sum];
      std::uint32_t& value = values_[part.sum];
      std::uint64_t& done = done_bytes_[part.sum];
      if (done == 0) {
        value = part.value;
      } else {
        value = sum.kind == SumKind::crc32 ? crc32_combine(value, part.value, part.bytes)
                                           : crc32c_combine(value, part.value, part.bytes);
      }
      done += part.bytes;
      if (done == sum.end - sum.begin) completed.push_back(part.sum);
    }
  }
  return completed;
}

}  // namespace trunkline::checkpoint
