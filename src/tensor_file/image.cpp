#include "tensor_file/image.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace trunkline::tensor_file {
namespace {

template <class T>
std::span<const T> touching(const std::vector<T>& sorted, std::uint64_t begin, std::uint64_t end) {
  const auto first =
      std::partition_point(sorted.begin(), sorted.end(), [&](const T& each) { return each.end() <= begin; });
  const auto last =
      std::partition_point(first, sorted.end(), [&](const T& each) { return each.offset < end; });
  return {first, last};
}

Status wrong(const Image& image, std::string what) {
  return std::unexpected(
      make_error(ErrorKind::invalid_argument, fmt::format("{}: {}", image.path, what), image.path));
}

Status check_extents(const Image& image) {
  std::uint64_t covered = 0;
  for (const Extent& extent : image.extents) {
    if (extent.memory.bytes > image.bytes || extent.offset > image.bytes - extent.memory.bytes) {
      return wrong(image, fmt::format("{} bytes at {} reach beyond the file's {}", extent.memory.bytes,
                                      extent.offset, image.bytes));
    }
    if (extent.offset < covered) {
      return wrong(image, fmt::format("{} bytes at {} overlap others", extent.memory.bytes, extent.offset));
    }
    covered = extent.end();
  }
  return {};
}

Status check_sums(const Image& image) {
  std::uint64_t covered = 0;
  for (const Sum& sum : image.sums) {
    if (sum.begin < covered || sum.end < sum.begin || sum.end > image.bytes) {
      return wrong(image,
                   fmt::format("a checksum of {} .. {} is not within the file and behind the one before",
                               sum.begin, sum.end));
    }
    covered = sum.end;
  }
  return {};
}

Status check_patches(const Image& image) {
  std::uint64_t covered = 0;
  for (const Patch& patch : image.patches) {
    if (patch.sum >= image.sums.size() || patch.offset < covered || patch.offset > image.bytes ||
        patch.bytes() > image.bytes - patch.offset) {
      return wrong(image, fmt::format("the place for checksum {} at {} is not within the file, or another's",
                                      patch.sum, patch.offset));
    }
    const auto sum = std::partition_point(image.sums.begin(), image.sums.end(),
                                          [&](const Sum& each) { return each.end <= patch.offset; });
    if (sum != image.sums.end() && sum->begin < patch.end()) {
      return wrong(image, fmt::format("the place for a checksum at {} is itself summed", patch.offset));
    }
    covered = patch.end();
  }
  return {};
}

}  // namespace

Status Image::arrange() {
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return wrong(*this, fmt::format("{} bytes are beyond the largest file (2^63 - 1)", bytes));
  }
  std::ranges::sort(extents, {}, &Extent::offset);
  std::ranges::sort(patches, {}, &Patch::offset);
  if (auto status = check_extents(*this); !status) return status;
  if (auto status = check_sums(*this); !status) return status;
  return check_patches(*this);
}

std::span<const Extent> extents_in(const Image& image, std::uint64_t begin, std::uint64_t end) {
  return touching(image.extents, begin, end);
}

std::span<const Patch> patches_in(const Image& image, std::uint64_t begin, std::uint64_t end) {
  return touching(image.patches, begin, end);
}

}  // namespace trunkline::tensor_file
