#include "tensor_file/sum_fold.h"

#include <utility>

#include "mem/streaming_copy.h"
#include "mem/summed_copy.h"
#include "trunkline/checksum.h"

namespace trunkline::tensor_file {

void BlockSums::add(const Sum* sum, std::span<const std::byte> bytes, std::byte* copy_to) {
  if (sum == nullptr) {
    if (copy_to != nullptr) streaming_copy(copy_to, bytes.data(), bytes.size());
    return;
  }
  const auto index = static_cast<std::uint32_t>(sum - image_.sums.data());
  if (parts_.empty() || parts_.back().sum != index) parts_.push_back({.sum = index});
  PartialSum& part = parts_.back();
  const bool zip = sum->kind == SumKind::crc32;
  if (copy_to == nullptr) {
    part.value = zip ? crc32(bytes, part.value) : crc32c(bytes, part.value);
  } else {
    part.value =
        zip ? copy_with_crc32(copy_to, bytes, part.value) : copy_with_crc32c(copy_to, bytes, part.value);
  }
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

}  // namespace trunkline::tensor_file
