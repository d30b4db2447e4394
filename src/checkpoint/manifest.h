// The manifest of a checkpoint (docs/formats/checkpoint.md): the files that it consists of, their checksums,
// and where each tensor is stored. Formatting and parsing; no I/O.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <expected>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "trunkline/error.h"
#include "trunkline/units.h"

namespace trunkline::checkpoint {

inline constexpr std::uint64_t kChunkBytes = kMiB;  // of new checkpoints; what readers accept:
inline constexpr std::uint64_t kMinChunkBytes = 4 * kKiB;
inline constexpr std::uint64_t kMaxChunkBytes = 64 * kMiB;
inline constexpr std::uint64_t kMaxNumber = (1ULL << 63) - 1;  // of any number in a manifest
inline constexpr std::uint64_t kMaxWorldSize = 1 << 24;
inline constexpr std::uint64_t kMaxManifestBytes =
    2 * kGiB;                                        // of the JSON: limits the memory that readers need
inline constexpr std::uint64_t kFirstVersion = 1;    // of manifests without features
inline constexpr std::uint64_t kFeatureVersion = 2;  // of those with some
inline constexpr std::string_view kViewsFeature = "views";      // the state has views of shared memory
inline constexpr std::string_view kMetricsFeature = "metrics";  // the manifest has metrics
// The manifest has digests, and its shards may be those of earlier commits.
inline constexpr std::string_view kIncrementalFeature = "incremental";
inline constexpr std::string_view kOwnVolume = ".";  // the directory that holds the manifests

struct Shard {
  std::uint64_t volume = 0;           // index into Manifest::volumes
  std::string file = {};              // a plain name
  std::uint64_t bytes = 0;            // of the whole file
  std::vector<std::uint32_t> crc32c;  // of each chunk of the whole file, the last of which may be shorter
  std::uint64_t commit = 0;           // the earlier one that wrote it; 0: this one
  bool operator==(const Shard&) const = default;
};

// Contiguous bytes of a tensor.
struct Piece {
  std::uint64_t shard = 0;   // index into Manifest::shards
  std::uint64_t offset = 0;  // bytes from the start of the shard's file
  std::uint64_t bytes = 0;
  bool operator==(const Piece&) const = default;
};

// Of consecutive units of a tensor.
struct DigestRun {
  std::uint64_t first = 0;  // index of the first unit
  std::vector<Digest> digests;
  bool operator==(const DigestRun&) const = default;
};

struct Tensor {
  std::string name;
  std::string dtype;  // as safetensors names it ("BF16"), or as torch does ("torch.complex128")
  std::vector<std::uint64_t> shape;     // in elements
  std::vector<Piece> pieces;            // in the order of the tensor's bytes
  std::vector<DigestRun> digests = {};  // ascending, without overlap
  bool operator==(const Tensor&) const = default;
};

// A measurement of the state, such as its loss.
struct Metric {
  std::string name;                             // not empty
  double value = 0;                             // may be infinite, or not a number
  bool operator==(const Metric& other) const {  // also where the value is not a number
    return name == other.name &&
           std::bit_cast<std::uint64_t>(value) == std::bit_cast<std::uint64_t>(other.value);
  }
};

struct Manifest {
  std::uint64_t step = 0;
  std::uint64_t commit = 0;          // from 1; grows with every commit into the directory
  std::string time = {};             // of the commit: "2026-01-31T23:59:59Z"
  std::vector<Metric> metrics = {};  // distinct names; only with kMetricsFeature, and then some
  std::uint64_t chunk_bytes = kChunkBytes;
  std::uint64_t unit_bytes = 0;  // that digests are of; 0: without kIncrementalFeature
  std::uint64_t world_size = 1;
  std::vector<std::string> volumes = {};  // kOwnVolume or absolute paths; each has a directory for the step
  std::vector<Shard> shards = {};
  std::vector<Tensor> tensors = {};
  // What a reader must support beyond version 1; no duplicates. A manifest without any has version 1.
  std::vector<std::string> features = {};
  std::string state =
      "null";  // a JSON text, kept unchanged: the order of its keys and its numbers are the user's
  bool operator==(const Manifest&) const = default;
};

std::uint64_t chunks_of(std::uint64_t bytes, std::uint64_t chunk_bytes);

// Bytes of the shards that this commit wrote itself.
std::uint64_t bytes_written(const Manifest& manifest);

bool is_plain_file_name(std::string_view name);

// The contents of the file have two parts. First comes the line that frames the rest: it reveals every
// flipped bit and every missing or additional byte.
std::string frame_manifest(std::string_view json, std::uint64_t version = kFirstVersion);
struct FramedManifest {
  std::uint64_t version = kFirstVersion;
  std::string_view json;
};
// Returns the JSON inside; `corrupt` where it does not match the first line, `format` where there is no such
// line or it has a newer version. `path` is only used in messages, here and below.
Result<FramedManifest> unframe_manifest(std::string_view text, const std::string& path);
inline constexpr std::size_t kMaxLineBytes = 128;         // of a line of any version
std::string_view first_line(std::string_view beginning);  // without its line feed; everything if it has none
// For a file of which only the beginning (kMaxLineBytes, or all of it) was read: the checks of
// unframe_manifest() on the first line and the file's size.
Status check_first_line(std::string_view beginning, std::uint64_t file_bytes, const std::string& path);

// Then comes the JSON. Formatting rejects (invalid_argument) what parsing would reject (`format`).
Result<std::string> manifest_to_json(const Manifest& manifest);
Result<Manifest> manifest_from_json(std::string_view json, const std::string& path);
// The same for a text without a file: the manifest, or why it is invalid.
std::expected<Manifest, std::string> manifest_from_text(std::string_view json);

// Formats and frames.
Result<std::string> format_manifest(const Manifest& manifest);
Result<Manifest> parse_manifest(std::string_view text, const std::string& path);

}  // namespace trunkline::checkpoint
