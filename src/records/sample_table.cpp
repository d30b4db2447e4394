#include "records/sample_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace trunkline::records {
namespace {

Status require(bool condition, std::string_view what) {
  if (condition) return {};
  return std::unexpected(make_error(ErrorKind::invalid_argument, fmt::format("index: {}", what)));
}

}  // namespace

Status SampleTable::check() const {
  const std::size_t files = path_ends.size();
  if (auto status = require(files > 0 && files < std::numeric_limits<std::uint32_t>::max(), "has no files");
      !status)
    return status;
  const bool paths_fit = std::ranges::is_sorted(path_ends) && path_ends.back() == path_blob.size();
  if (auto status = require(paths_fit, "paths and their ends do not fit"); !status) return status;
  const bool counts_fit = first_samples.size() == files + 1 && first_samples.front() == 0 &&
                          std::ranges::is_sorted(first_samples);
  if (auto status = require(counts_fit, "numbers of samples do not fit the files"); !status) return status;
  const bool stats_fit = sizes.size() == files && (mtimes_ns.empty() || mtimes_ns.size() == files) &&
                         inodes.size() == mtimes_ns.size();
  if (auto status = require(stats_fit, "sizes and times do not fit the files"); !status) return status;
  if (is_uniform())
    return require(stride_bytes > 0 && first_offsets.size() == files, "records do not fit the files");
  const bool is_filled = ranges_per_sample > 0 && offsets.size() == lengths.size() &&
                         sample_count() <= offsets.size() / ranges_per_sample &&
                         offsets.size() == sample_count() * ranges_per_sample;
  return require(is_filled, "offsets and lengths do not fit the number of samples");
}

std::string_view SampleTable::path(std::uint32_t file) const {
  const std::uint64_t begin = file == 0 ? 0 : path_ends[file - 1];
  return {path_blob.data() + begin, path_ends[file] - begin};
}

Result<StoredRange> SampleTable::range(std::uint64_t sample, std::uint64_t index) const {
  const auto after = std::ranges::upper_bound(first_samples.begin(), first_samples.end() - 1, sample);
  StoredRange range{.file = static_cast<std::uint32_t>(after - first_samples.begin() - 1)};
  if (is_uniform()) {
    range.offset = first_offsets[range.file] + (sample - first_samples[range.file]) * stride_bytes;
    range.length = record_bytes;
  } else {
    range.offset = offsets[sample * ranges_per_sample + index];
    range.length = lengths[sample * ranges_per_sample + index];
  }
  const std::uint64_t file_bytes = sizes[range.file];
  if (range.length > file_bytes || range.offset > file_bytes - range.length)
    return std::unexpected(make_error(
        ErrorKind::corrupt,
        fmt::format(
            "index: sample {} is said to be {} bytes at {} of {}, which has {} bytes; rebuild the index",
            sample, range.length, range.offset, path(range.file), file_bytes),
        path(range.file)));
  return range;
}

}  // namespace trunkline::records
