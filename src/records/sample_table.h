// Where the samples of a data set are stored.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "trunkline/error.h"

namespace trunkline::records {

struct StoredRange {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// The files, and the samples in them: numbered file after file. Nothing is copied: all of it may be mapped
// from disk, and must outlive the table. Immutable; thread-safe.
struct SampleTable {
  // Files, one after another. A path ends where the next one begins.
  std::span<const char> path_blob;
  std::span<const std::uint64_t> path_ends;
  std::span<const std::uint64_t> first_samples;  // of each file, then the number of all samples
  std::span<const std::uint64_t> sizes;          // bytes
  // As they were when the files were indexed; empty: not compared.
  std::span<const std::int64_t> mtimes_ns;
  std::span<const std::uint64_t> inodes;

  // A table: ranges_per_sample ranges for each sample.
  std::span<const std::uint64_t> offsets;
  std::span<const std::uint64_t> lengths;
  std::uint64_t ranges_per_sample = 1;
  // Or uniform samples: sample i of a file begins at its first_offset + i * stride_bytes.
  std::uint64_t record_bytes = 0;
  std::uint64_t stride_bytes = 0;
  std::span<const std::uint64_t> first_offsets;

  // Whether the spans fit each other; invalid_argument if not.
  Status check() const;

  std::size_t file_count() const { return path_ends.size(); }
  std::uint64_t sample_count() const { return first_samples.back(); }
  std::string_view path(std::uint32_t file) const;
  // `sample` < sample_count(), `index` < ranges_per_sample. `corrupt` for a range outside of its file.
  Result<StoredRange> range(std::uint64_t sample, std::uint64_t index) const;
  bool is_uniform() const { return record_bytes != 0; }
};

}  // namespace trunkline::records
