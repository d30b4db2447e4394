// Reads batches of samples that are in more files than may be open at a time.
#include <algorithm>
#include <deque>
#include <unordered_set>
#include <utility>

#include "base/rounding.h"
#include "mem/page_sizes.h"
#include "records/sample_reader.h"

namespace trunkline::records {
namespace {

constexpr std::size_t kGroupsInFlight = 2;

struct Group {
  BatchPlan plan;
  std::uint64_t begin = 0;  // in the batch's memory
  std::span<std::byte> memory;
  Future future;  // not valid where there is nothing to read
};

// `group` has been read, and its ranges are relative to its own memory.
void append(BatchPlan& batch, Group&& group) {
  for (PlacedRange& range : group.plan.ranges) {
    range.position += group.begin;
    batch.ranges.push_back(range);
  }
  batch.samples.insert(batch.samples.end(), group.plan.samples.begin(), group.plan.samples.end());
  std::ranges::move(group.plan.skipped, std::back_inserter(batch.skipped));
  batch.bytes = group.begin + group.plan.bytes;
}

}  // namespace

// Of one batch. All batches together have at most as many open as stay open for later ones.
std::size_t SampleReader::max_files() const {
  return std::max<std::size_t>(1, open_files_.capacity() / std::max(2U, options_.batches));
}

bool SampleReader::has_many_files(std::span<const std::uint64_t> samples) const {
  return table_->file_count() > max_files() && group_size(samples) < samples.size();
}

// How many of the first samples have as many files as may be open, or one with more.
std::size_t SampleReader::group_size(std::span<const std::uint64_t> samples) const {
  std::unordered_set<std::uint32_t> files;
  std::size_t count = 0;
  for (; count < samples.size(); ++count) {
    for (std::uint64_t index = 0; index < table_->ranges_per_sample; ++index) {
      if (const auto range = table_->range(samples[count], index)) files.insert(range->file);
    }
    if (count > 0 && files.size() > max_files()) break;
  }
  return count;
}

std::uint64_t SampleReader::bytes_at_most(std::span<const std::uint64_t> samples) const {
  std::uint64_t bytes = 0;
  for (const StoredRange& range : stored_ranges(samples))
    bytes += round_up(range.offset + range.length, kPageBytes) - round_down(range.offset, kPageBytes);
  return bytes;
}

Result<BatchPlan> SampleReader::read_in_groups(std::span<const std::uint64_t> samples,
                                               std::span<std::byte> memory, const Keepalive& keepalive,
                                               const Submit& submit, const Wait& wait) {
  BatchPlan batch;
  std::deque<Group> in_flight;
  const auto finish_first = [&]() -> Status {
    Group group = std::move(in_flight.front());
    in_flight.pop_front();
    Result<std::uint64_t> read = 0;
    if (group.future.valid()) {
      if (auto waited = wait(group.future); !waited) return waited;
      read = group.future.result();
    }
    if (auto status = finish(read, group.memory, group.plan); !status) return status;
    append(batch, std::move(group));
    return {};
  };
  const auto begin = [&](std::span<const std::uint64_t> of_group, std::uint64_t& end) -> Status {
    auto planned = plan(of_group);
    if (!planned) return std::unexpected(planned.error());
    Group& group = in_flight.emplace_back();
    group.plan = std::move(*planned);
    group.begin = round_up(end, group.plan.alignment);
    group.memory = memory.subspan(group.begin, group.plan.bytes);
    end = group.begin + group.plan.bytes;
    if (group.plan.bytes == 0) return {};
    auto future = submit(request(group.plan, group.memory, keepalive));
    if (!future) return std::unexpected(future.error());
    group.future = std::move(*future);
    return {};
  };
  const auto run = [&]() -> Status {
    std::uint64_t end = 0;
    while (!samples.empty()) {
      if (in_flight.size() == kGroupsInFlight) {
        if (auto status = finish_first(); !status) return status;
      }
      const std::size_t count = group_size(samples);
      if (auto status = begin(samples.first(count), end); !status) return status;
      samples = samples.subspan(count);
    }
    while (!in_flight.empty()) {
      if (auto status = finish_first(); !status) return status;
    }
    return {};
  };
  const Status status = run();
  for (Group& group : in_flight) {
    if (group.future.valid()) group.future.cancel();  // the keepalive owns the memory until it ends
  }
  if (!status) return std::unexpected(status.error());
  return batch;
}

}  // namespace trunkline::records
