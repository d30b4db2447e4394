#include "io/lane/range_list.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "base/invalid_argument.h"
#include "io/file/file_core.h"
#include "trunkline/engine.h"

namespace trunkline::io {
namespace {

Status check(const FileRanges& all, std::size_t index, std::uint64_t memory_bytes) {
  const FileRange& range = all.ranges[index];
  if (range.file >= all.files.size())
    return invalid_argument(fmt::format("ranges: range {} is of file {}, but there are {} files", index,
                                        range.file, all.files.size()));
  constexpr std::uint64_t kMaxOffset = std::numeric_limits<std::int64_t>::max();
  if (range.length > kMaxOffset || range.offset > kMaxOffset - range.length)
    return invalid_argument(
        fmt::format("ranges: range {}: offset {} + {} bytes is beyond the largest file offset "
                    "(2^63 - 1)",
                    index, range.offset, range.length));
  if (range.length > memory_bytes || range.position > memory_bytes - range.length)
    return invalid_argument(
        fmt::format("ranges: range {}: {} bytes at position {} do not fit into the {} bytes of the "
                    "buffer",
                    index, range.length, range.position, memory_bytes));
  return {};
}

}  // namespace

Result<RangeList> RangeList::create(const FileRanges& ranges, const MemoryView& memory) {
  RangeList list;
  for (std::size_t index = 0; index < ranges.files.size(); ++index) {
    if (!ranges.files[index].valid())
      return invalid_argument(
          fmt::format("files: file {} is not open; a request requires open files", index));
    list.files.push_back(ranges.files[index].core());
  }
  list.file_count = list.files.size();
  list.items.reserve(ranges.ranges.size());
  for (std::size_t index = 0; index < ranges.ranges.size(); ++index) {
    if (auto status = check(ranges, index, memory.bytes); !status) return std::unexpected(status.error());
    const FileRange& range = ranges.ranges[index];
    if (range.length == 0) continue;
    list.bytes += range.length;
    list.items.push_back({.file = list.files[range.file].get(),
                          .offset = range.offset,
                          .length = range.length,
                          .memory = memory.data + range.position,
                          .index = index});
  }
  const auto order = [](const Item& item) { return std::tuple(item.file, item.offset); };
  if (!std::ranges::is_sorted(list.items, {}, order)) std::ranges::sort(list.items, {}, order);
  return list;
}

Status RangeList::begin() {
  for (std::size_t index = 0; index < files.size(); ++index) {
    unsigned unused_epoch = 0;  // of writes
    if (auto begun = files[index]->begin(Op::read, 0, 0, unused_epoch); !begun) {
      for (std::size_t undone = 0; undone < index; ++undone) files[undone]->end(Op::read, 0);
      return begun;
    }
  }
  return {};
}

void RangeList::end() {
  for (const std::shared_ptr<FileCore>& file : files) file->end(Op::read, 0);
  files.clear();
}

}  // namespace trunkline::io
