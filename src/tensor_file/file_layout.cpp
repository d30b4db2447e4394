#include "tensor_file/file_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
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

Status wrong(const FileLayout& layout, std::string what) {
  return std::unexpected(
      make_error(ErrorKind::invalid_argument, fmt::format("{}: {}", layout.path, what), layout.path));
}

Status check_extents(const FileLayout& layout) {
  std::uint64_t covered = 0;
  for (const Extent& extent : layout.extents) {
    if (extent.memory.bytes > layout.bytes || extent.offset > layout.bytes - extent.memory.bytes) {
      return wrong(layout, fmt::format("{} bytes at {} reach past the file's {}", extent.memory.bytes,
                                       extent.offset, layout.bytes));
    }
    if (extent.offset < covered) {
      return wrong(layout, fmt::format("{} bytes at {} overlap others", extent.memory.bytes, extent.offset));
    }
    covered = extent.end();
  }
  return {};
}

Status check_checksums(const FileLayout& layout) {
  std::uint64_t covered = 0;
  for (const Checksum& checksum : layout.checksums) {
    if (checksum.begin < covered || checksum.end < checksum.begin || checksum.end > layout.bytes) {
      return wrong(
          layout,
          fmt::format("the checksum of {} .. {} is outside the file, or does not follow the previous one",
                      checksum.begin, checksum.end));
    }
    covered = checksum.end;
  }
  return {};
}

Status check_checksum_fields(const FileLayout& layout) {
  std::uint64_t covered = 0;
  for (const ChecksumField& field : layout.checksum_fields) {
    if (field.checksum >= layout.checksums.size() || field.offset < covered || field.offset > layout.bytes ||
        field.bytes() > layout.bytes - field.offset) {
      return wrong(layout,
                   fmt::format("the place for checksum {} at {} is outside the file, or overlaps another",
                               field.checksum, field.offset));
    }
    const auto checksum =
        std::partition_point(layout.checksums.begin(), layout.checksums.end(),
                             [&](const Checksum& each) { return each.end <= field.offset; });
    if (checksum != layout.checksums.end() && checksum->begin < field.end()) {
      return wrong(layout,
                   fmt::format("the place for a checksum at {} is covered by a checksum", field.offset));
    }
    covered = field.end();
  }
  return {};
}

}  // namespace

std::uint64_t ChecksumField::bytes() const {
  switch (encoding) {
    case ChecksumEncoding::le32:
      return 4;
    case ChecksumEncoding::hex:
      return 8;
  }
  std::abort();  // not an enumerator
}

Status FileLayout::arrange() {
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return wrong(*this, fmt::format("{} bytes exceed the largest file (2^63 - 1)", bytes));
  }
  std::ranges::sort(extents, {}, &Extent::offset);
  std::ranges::sort(checksum_fields, {}, &ChecksumField::offset);
  if (auto status = check_extents(*this); !status) return status;
  if (auto status = check_checksums(*this); !status) return status;
  return check_checksum_fields(*this);
}

std::span<const Extent> extents_in(const FileLayout& layout, std::uint64_t begin, std::uint64_t end) {
  return touching(layout.extents, begin, end);
}

std::span<const ChecksumField> checksum_fields_in(const FileLayout& layout, std::uint64_t begin,
                                                  std::uint64_t end) {
  return touching(layout.checksum_fields, begin, end);
}

}  // namespace trunkline::tensor_file
