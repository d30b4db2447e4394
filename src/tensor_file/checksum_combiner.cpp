#include "tensor_file/checksum_combiner.h"

#include <utility>

#include "mem/streaming_copy.h"
#include "mem/summed_copy.h"
#include "trunkline/checksum.h"

namespace trunkline::tensor_file {

void BlockChecksums::add(const Checksum* checksum, std::span<const std::byte> bytes, std::byte* copy_to) {
  if (checksum == nullptr) {
    if (copy_to != nullptr) streaming_copy(copy_to, bytes.data(), bytes.size());
    return;
  }
  const auto index = static_cast<std::uint32_t>(checksum - layout_.checksums.data());
  if (parts_.empty() || parts_.back().checksum != index) parts_.push_back({.checksum = index});
  PartialChecksum& part = parts_.back();
  const bool zip = checksum->kind == ChecksumKind::crc32;
  if (copy_to == nullptr) {
    part.value = zip ? crc32(bytes, part.value) : crc32c(bytes, part.value);
  } else {
    part.value =
        zip ? copy_with_crc32(copy_to, bytes, part.value) : copy_with_crc32c(copy_to, bytes, part.value);
  }
  part.bytes += bytes.size();
}

std::vector<std::uint32_t> ChecksumCombiner::add(std::size_t index, std::vector<PartialChecksum> parts) {
  pending_[index] = {.known = true, .parts = std::move(parts)};
  std::vector<std::uint32_t> completed;
  for (; folded_ < pending_.size() && pending_[folded_].known; ++folded_) {
    for (const PartialChecksum& part : std::exchange(pending_[folded_].parts, {})) {
      const Checksum& checksum = layout_.checksums[part.checksum];
      std::uint32_t& value = values_[part.checksum];
      std::uint64_t& done = done_bytes_[part.checksum];
      if (done == 0) {
        value = part.value;
      } else {
        value = checksum.kind == ChecksumKind::crc32 ? crc32_combine(value, part.value, part.bytes)
                                                     : crc32c_combine(value, part.value, part.bytes);
      }
      done += part.bytes;
      if (done == checksum.end - checksum.begin) completed.push_back(part.checksum);
    }
  }
  return completed;
}

}  // namespace trunkline::tensor_file
