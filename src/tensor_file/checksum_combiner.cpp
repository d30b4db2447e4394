#include "tensor_file/checksum_combiner.h"

#include <cstdlib>
#include <utility>

#include "mem/streaming_copy.h"
#include "mem/summed_copy.h"
#include "trunkline/checksum.h"

namespace trunkline::tensor_file {
namespace {

struct Algorithm {
  std::uint32_t (*compute)(std::span<const std::byte> bytes, std::uint32_t seed);
  std::uint32_t (*copy)(std::byte* target, std::span<const std::byte> source, std::uint32_t seed);
  std::uint32_t (*combine)(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes);
};

// Without a default: the compiler reports a kind that is missing here.
Algorithm algorithm_of(ChecksumKind kind) {
  switch (kind) {
    case ChecksumKind::crc32:
      return {.compute = crc32, .copy = copy_with_crc32, .combine = crc32_combine};
    case ChecksumKind::crc32c:
      return {.compute = crc32c, .copy = copy_with_crc32c, .combine = crc32c_combine};
  }
  std::abort();  // not an enumerator
}

}  // namespace

void BlockChecksums::add(const Checksum* checksum, std::span<const std::byte> bytes, std::byte* copy_to) {
  if (checksum == nullptr) {
    if (copy_to != nullptr) streaming_copy(copy_to, bytes.data(), bytes.size());
    return;
  }
  const auto index = static_cast<std::uint32_t>(checksum - layout_.checksums.data());
  if (parts_.empty() || parts_.back().checksum != index) parts_.push_back({.checksum = index});
  PartialChecksum& part = parts_.back();
  const Algorithm algorithm = algorithm_of(checksum->kind);
  part.value =
      copy_to == nullptr ? algorithm.compute(bytes, part.value) : algorithm.copy(copy_to, bytes, part.value);
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
      auto* const combine = algorithm_of(checksum.kind).combine;
      value = done == 0 ? part.value : combine(value, part.value, part.bytes);
      done += part.bytes;
      if (done == checksum.end - checksum.begin) completed.push_back(part.checksum);
    }
  }
  return completed;
}

}  // namespace trunkline::tensor_file
