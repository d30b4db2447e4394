// Reads samples: as many as a batch has, in one operation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "records/open_files.h"
#include "records/sample_table.h"
#include "trunkline/engine.h"

namespace trunkline::records {

// What the ranges of an index include besides the samples.
enum class Framing { none, tfrecord };

struct SkippedSample {
  std::uint64_t sample = 0;
  Error error;
};

struct PlannedFile {
  File file;
  std::uint32_t number = 0;  // in the table
  std::uint64_t bytes = 0;
  std::uint64_t alignment = 1;  // of offsets and lengths in direct transfers; 1 where the page cache is used
};

// A range of a sample, and where it goes.
struct PlacedRange {
  std::uint32_t file = 0;  // index into BatchPlan::files
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::uint64_t position = 0;  // bytes from the start of the batch's memory
};

// The reads of a batch, and the memory that it requires.
struct BatchPlan {
  std::vector<std::uint64_t> samples;
  std::vector<PlacedRange> ranges;  // ranges_per_sample of each sample
  std::vector<PlannedFile> files;
  std::vector<FileRange> reads;  // in the order of files and offsets
  std::uint64_t bytes = 0;
  std::uint64_t alignment = 1;  // of the memory
  std::vector<SkippedSample> skipped;
};

struct SampleReaderOptions {
  Framing framing = Framing::none;
  // Leave out samples that cannot be read or are damaged, and report them; else the first one is an error.
  bool skip_damaged = false;
  unsigned batches = 1;  // that are read at a time, and share the files that may be open
};

// Life of a batch: plan() -> the caller provides memory of plan.bytes -> submit() -> the Future is done ->
// finish(). A batch with many files is read by read_in_groups() instead. For use by one thread, but for
// finish(), which another one may call.
class SampleReader {
 public:
  SampleReader(Engine engine, std::shared_ptr<const SampleTable> table, std::optional<Volume> volume,
               SampleReaderOptions options);

  // Opens files. Each of `samples` is below the table's sample_count().
  Result<BatchPlan> plan(std::span<const std::uint64_t> samples);

  // What reads a plan into page-aligned memory.
  static Request request(const BatchPlan& plan, std::span<std::byte> memory, Keepalive keepalive);

  // Looks at the result of the request and at whether the files are as they were indexed, and verifies and
  // removes the framing. What is skipped moves from plan.samples and plan.ranges to plan.skipped.
  Status finish(const Result<std::uint64_t>& read, std::span<std::byte> memory, BatchPlan& plan) const;

  // Whether the samples are in more files than one batch may have open.
  bool has_many_files(std::span<const std::uint64_t> samples) const;

  using Submit = std::function<Result<Future>(const Request&)>;
  using Wait = std::function<Status(const Future&)>;  // until it is done, or not wanted any more
  // Opens, reads and closes the files of a batch in groups; two groups are in flight. Returns a plan after
  // finish(). `memory`: page-aligned, bytes_at_most() bytes; `keepalive` owns it.
  Result<BatchPlan> read_in_groups(std::span<const std::uint64_t> samples, std::span<std::byte> memory,
                                   const Keepalive& keepalive, const Submit& submit, const Wait& wait);
  std::uint64_t bytes_at_most(std::span<const std::uint64_t> samples) const;

 private:
  using PlannedFiles = std::unordered_map<std::uint32_t, std::uint32_t>;  // of the table: of the plan

  void open_ahead(std::span<const std::uint64_t> samples);
  Status add_sample(std::uint64_t sample, PlannedFiles& known, BatchPlan& plan);
  Result<std::uint32_t> add_file(std::uint32_t file, PlannedFiles& known, BatchPlan& plan);
  std::vector<std::optional<Error>> changed_files(const BatchPlan& plan) const;
  std::vector<std::optional<Error>> read_one_by_one(std::span<std::byte> memory, const BatchPlan& plan) const;
  std::span<PlacedRange> ranges_of(BatchPlan& plan, std::size_t index) const;
  std::vector<StoredRange> stored_ranges(std::span<const std::uint64_t> samples) const;
  std::size_t group_size(std::span<const std::uint64_t> samples) const;
  std::size_t max_files() const;

  Engine engine_;
  std::shared_ptr<const SampleTable> table_;
  SampleReaderOptions options_;
  OpenFiles open_files_;
};

}  // namespace trunkline::records
