#include "records/sample_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/rounding.h"
#include "io/file/file_core.h"
#include "mem/page_sizes.h"
#include "records/tfrecord_framing.h"

namespace trunkline::records {
namespace {

// Samples up to this size are placed next to each other, and copied: that costs less than the bytes that
// rounding each of them out to the device's blocks would cost. Larger ones are read in place.
constexpr std::uint64_t kSmallBytes = 16 * 1024;
// Of samples that have different sizes, so that they can be viewed as any type.
constexpr std::uint64_t kSampleAlignment = 64;
std::uint64_t alignment_of(const File& file) {
  std::uint64_t alignment = 1;
  for (const io::Member& member : file.core()->members) {
    if (member.pair.limits.usable) alignment = std::max(alignment, member.pair.limits.offset_alignment);
  }
  return alignment;
}

void place_small(BatchPlan& plan) {
  const auto has_other_length = [&](const PlacedRange& range) {
    return range.length != plan.ranges.front().length;
  };
  const bool is_uniform = std::ranges::none_of(plan.ranges, has_other_length);
  plan.alignment = is_uniform ? 1 : kSampleAlignment;
  for (PlacedRange& range : plan.ranges) {
    range.position = plan.bytes;
    plan.bytes += is_uniform ? range.length : round_up(range.length, kSampleAlignment);
    plan.reads.push_back(
        {.offset = range.offset, .length = range.length, .position = range.position, .file = range.file});
  }
}

// Rounds each range out to the device's blocks, so that it is read without a copy. Ranges that touch each
// other in the file are read as one; those that overlap are not, since then a change of one sample would
// change the other.
void place_large(BatchPlan& plan) {
  std::vector<std::size_t> by_offset(plan.ranges.size());
  std::iota(by_offset.begin(), by_offset.end(), 0);
  std::ranges::sort(by_offset, {}, [&](std::size_t index) {
    return std::tuple(plan.ranges[index].file, plan.ranges[index].offset);
  });
  plan.alignment = kPageBytes;
  std::uint64_t end_of_samples = 0;  // in the file of the last read
  for (const std::size_t index : by_offset) {
    PlacedRange& range = plan.ranges[index];
    const PlannedFile& file = plan.files[range.file];
    const std::uint64_t begin = round_down(range.offset, file.alignment);
    const std::uint64_t end = std::min(round_up(range.offset + range.length, file.alignment), file.bytes);
    FileRange* read = plan.reads.empty() ? nullptr : &plan.reads.back();
    const bool touches = read != nullptr && read->file == range.file && range.offset >= end_of_samples &&
                         begin <= read->offset + read->length;
    if (!touches) {
      plan.bytes = round_up(plan.bytes, kPageBytes);
      read = &plan.reads.emplace_back(
          FileRange{.offset = begin, .length = 0, .position = plan.bytes, .file = range.file});
    }
    read->length = std::max(read->length, end - read->offset);
    range.position = read->position + (range.offset - read->offset);
    plan.bytes = read->position + read->length;
    end_of_samples = range.offset + range.length;
  }
}

}  // namespace

SampleReader::SampleReader(Engine engine, std::shared_ptr<const SampleTable> table,
                           std::optional<Volume> volume, SampleReaderOptions options)
    : engine_(engine),
      table_(table),
      options_(options),
      open_files_(std::move(engine), std::move(table), std::move(volume)) {}

Result<BatchPlan> SampleReader::plan(std::span<const std::uint64_t> samples) {
  BatchPlan plan;
  PlannedFiles known;
  plan.ranges.reserve(samples.size() * table_->ranges_per_sample);
  open_ahead(samples);
  for (const std::uint64_t sample : samples) {
    const std::size_t ranges = plan.ranges.size();
    if (auto status = add_sample(sample, known, plan); !status) {
      if (!options_.skip_damaged) return std::unexpected(status.error());
      plan.ranges.resize(ranges);
      plan.skipped.push_back({sample, status.error()});
    } else {
      plan.samples.push_back(sample);
    }
  }
  const auto is_small = [](const PlacedRange& range) { return range.length <= kSmallBytes; };
  if (std::ranges::all_of(plan.ranges, is_small)) {
    place_small(plan);
  } else {
    place_large(plan);
  }
  return plan;
}

// Those that can be read: plan() reports the others.
std::vector<StoredRange> SampleReader::stored_ranges(std::span<const std::uint64_t> samples) const {
  std::vector<StoredRange> ranges;
  ranges.reserve(samples.size() * table_->ranges_per_sample);
  for (const std::uint64_t sample : samples) {
    for (std::uint64_t index = 0; index < table_->ranges_per_sample; ++index) {
      if (const auto range = table_->range(sample, index)) ranges.push_back(*range);
    }
  }
  return ranges;
}

void SampleReader::open_ahead(std::span<const std::uint64_t> samples) {
  if (table_->file_count() == 1) return;
  std::vector<std::uint32_t> files;
  for (const StoredRange& range : stored_ranges(samples)) files.push_back(range.file);
  open_files_.open_ahead(files);
}

Status SampleReader::add_sample(std::uint64_t sample, PlannedFiles& known, BatchPlan& plan) {
  for (std::uint64_t index = 0; index < table_->ranges_per_sample; ++index) {
    const auto range = table_->range(sample, index);
    if (!range) return std::unexpected(range.error());
    const auto file = add_file(range->file, known, plan);
    if (!file) return std::unexpected(file.error());
    plan.ranges.push_back({.file = *file, .offset = range->offset, .length = range->length});
  }
  return {};
}

Result<std::uint32_t> SampleReader::add_file(std::uint32_t file, PlannedFiles& known, BatchPlan& plan) {
  if (const auto found = known.find(file); found != known.end()) return found->second;
  auto opened = open_files_.open(file);
  if (!opened) return std::unexpected(opened.error());
  const auto number = static_cast<std::uint32_t>(plan.files.size());
  // Where blocks are larger than a page, the engine rounds out.
  const std::uint64_t alignment = alignment_of(*opened);
  plan.files.push_back({.file = *opened,
                        .number = file,
                        .bytes = table_->sizes[file],
                        .alignment = alignment <= kPageBytes ? alignment : 1});
  known.emplace(file, number);
  return number;
}

Request SampleReader::request(const BatchPlan& plan, std::span<std::byte> memory, Keepalive keepalive) {
  FileRanges reads{.files = {}, .ranges = plan.reads};
  for (const PlannedFile& each : plan.files) reads.files.push_back(each.file);
  Request request{.memory = memory, .keepalive = std::move(keepalive)};
  request.ranges = std::make_shared<const FileRanges>(std::move(reads));
  return request;
}

Status SampleReader::finish(const Result<std::uint64_t>& read, std::span<std::byte> memory,
                            BatchPlan& plan) const {
  if (!read && read.error().kind == ErrorKind::cancelled) return std::unexpected(read.error());
  const std::vector<std::optional<Error>> changed = changed_files(plan);
  if (!read && !options_.skip_damaged) {
    for (const std::optional<Error>& cause : changed) {
      if (cause) return std::unexpected(*cause);
    }
    return std::unexpected(read.error());
  }
  std::vector<std::optional<Error>> failed(plan.samples.size());
  if (!read) failed = read_one_by_one(memory, plan);
  BatchPlan kept{.samples = {},
                 .ranges = {},
                 .files = {},
                 .reads = {},
                 .bytes = plan.bytes,
                 .alignment = plan.alignment,
                 .skipped = plan.skipped};
  for (std::size_t index = 0; index < plan.samples.size(); ++index) {
    std::optional<Error> error = std::move(failed[index]);
    const std::span<PlacedRange> ranges = ranges_of(plan, index);
    for (const PlacedRange& range : ranges) {
      if (changed[range.file]) error = changed[range.file];
    }
    if (!error && options_.framing == Framing::tfrecord) {
      PlacedRange& range = ranges.front();
      const PlannedFile& file = plan.files[range.file];
      if (auto status =
              check_tfrecord(memory.subspan(range.position, range.length), range.offset, file.file.path());
          !status) {
        error = status.error();
      } else {
        range.position += kTfrecordHeadBytes;
        range.length -= kTfrecordHeadBytes + kTfrecordTailBytes;
      }
    }
    if (!error) {
      kept.samples.push_back(plan.samples[index]);
      kept.ranges.insert(kept.ranges.end(), ranges.begin(), ranges.end());
    } else if (options_.skip_damaged) {
      kept.skipped.push_back({plan.samples[index], *error});
    } else {
      return std::unexpected(*error);
    }
  }
  plan = std::move(kept);
  return {};
}

// After the read: what was written before that, it may have seen.
std::vector<std::optional<Error>> SampleReader::changed_files(const BatchPlan& plan) const {
  std::vector<std::optional<Error>> changed(plan.files.size());
  for (std::size_t index = 0; index < changed.size(); ++index) {
    const PlannedFile& file = plan.files[index];
    if (auto status = open_files_.check_unchanged(file.file, file.number); !status)
      changed[index] = std::move(status.error());
  }
  return changed;
}

std::span<PlacedRange> SampleReader::ranges_of(BatchPlan& plan, std::size_t index) const {
  return std::span(plan.ranges).subspan(index * table_->ranges_per_sample, table_->ranges_per_sample);
}

// The error of each sample that cannot be read.
std::vector<std::optional<Error>> SampleReader::read_one_by_one(std::span<std::byte> memory,
                                                                const BatchPlan& plan) const {
  std::vector<Request> requests;
  for (const PlacedRange& range : plan.ranges) {
    requests.push_back({.op = Op::read,
                        .file = &plan.files[range.file].file,
                        .memory = memory.subspan(range.position, range.length),
                        .offset = range.offset});
  }
  const std::vector<Future> futures = engine_.submit(requests);
  std::vector<std::optional<Error>> failed(plan.samples.size());
  for (std::size_t index = 0; index < futures.size(); ++index) {
    if (const auto read = futures[index].result(); !read)
      failed[index / table_->ranges_per_sample] = read.error();
  }
  return failed;
}

}  // namespace trunkline::records
