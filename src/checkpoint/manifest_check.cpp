#include "checkpoint/manifest_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "format/safetensors.h"

namespace trunkline::checkpoint {
namespace {

using Objection = std::optional<std::string>;

constexpr std::size_t kMaxNameBytes = 255;  // NAME_MAX
constexpr std::size_t kMaxDtypeBytes = 64;

bool is_number(std::string_view digits, unsigned min, unsigned max) {
  unsigned value = 0;
  for (const char digit : digits) {
    if (digit < '0' || digit > '9') return false;
    value = 10 * value + static_cast<unsigned>(digit - '0');
  }
  return value >= min && value <= max;
}

// "2026-01-31T23:59:59Z"; before 1970 where the clock was wrong
bool is_time(std::string_view text) {
  constexpr std::string_view kPattern = "....-..-..T..:..:..Z";
  if (text.size() != kPattern.size()) return false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (kPattern[i] != '.' && text[i] != kPattern[i]) return false;
  }
  return is_number(text.substr(0, 4), 1900, 9999) && is_number(text.substr(5, 2), 1, 12) &&
         is_number(text.substr(8, 2), 1, 31) && is_number(text.substr(11, 2), 0, 23) &&
         is_number(text.substr(14, 2), 0, 59) && is_number(text.substr(17, 2), 0, 60);  // a leap second
}

Objection of_numbers(const Manifest& manifest) {
  if (manifest.step > kMaxNumber) return "\"step\" is greater than 2^63 - 1";
  if (manifest.commit == 0 || manifest.commit > kMaxNumber) return "\"commit\" is not in 1 .. 2^63 - 1";
  if (!is_time(manifest.time)) return "\"time\" is not of the form 2026-01-31T23:59:59Z";
  if (!std::has_single_bit(manifest.chunk_bytes) || manifest.chunk_bytes < kMinChunkBytes ||
      manifest.chunk_bytes > kMaxChunkBytes) {
    return fmt::format("\"chunk_bytes\" is not a power of two in {} .. {}", kMinChunkBytes, kMaxChunkBytes);
  }
  if (manifest.unit_bytes != 0 &&
      (!std::has_single_bit(manifest.unit_bytes) || manifest.unit_bytes < kMinChunkBytes ||
       manifest.unit_bytes > kMaxChunkBytes)) {
    return fmt::format("\"unit_bytes\" is not a power of two in {} .. {}", kMinChunkBytes, kMaxChunkBytes);
  }
  if (manifest.world_size == 0 || manifest.world_size > kMaxWorldSize)
    return fmt::format("\"world_size\" is not in 1 .. {}", kMaxWorldSize);
  return std::nullopt;
}

Objection of_features(const Manifest& manifest) {
  std::set<std::string_view> seen;
  for (const std::string& feature : manifest.features) {
    const bool known =
        feature == kViewsFeature || feature == kMetricsFeature || feature == kIncrementalFeature;
    if (!known || !seen.insert(feature).second)
      return "\"features\" has an entry that is unknown or duplicated";
  }
  if (seen.contains(kIncrementalFeature) != (manifest.unit_bytes != 0))
    return "\"unit_bytes\" and the feature \"incremental\" require each other";
  if (seen.contains(kMetricsFeature) == manifest.metrics.empty())
    return "\"metrics\" and the feature \"metrics\" require each other";
  std::set<std::string_view> names;
  for (const Metric& metric : manifest.metrics) {
    if (metric.name.empty()) return "a metric has no name";
    if (!names.insert(metric.name).second) return fmt::format("the metric \"{}\" is duplicated", metric.name);
  }
  return std::nullopt;
}

Objection of_volumes(const Manifest& manifest) {
  std::set<std::string_view> seen;
  for (const std::string& volume : manifest.volumes) {
    if (volume != kOwnVolume && (!volume.starts_with('/') || volume.find('\0') != std::string::npos))
      return fmt::format("the volume \"{}\" is neither \".\" nor an absolute path", volume);
    if (!seen.insert(volume).second) return fmt::format("the volume \"{}\" is duplicated", volume);
  }
  return std::nullopt;
}

Objection of_shards(const Manifest& manifest) {
  std::set<std::pair<std::uint64_t, std::string_view>> seen;
  for (const Shard& shard : manifest.shards) {
    if (shard.volume >= manifest.volumes.size())
      return fmt::format("shard \"{}\": volume {} does not exist", shard.file, shard.volume);
    if (!is_plain_file_name(shard.file))
      return fmt::format("shard \"{}\": \"file\" is not a plain file name", shard.file);
    if (!seen.emplace(shard.volume, shard.file).second)
      return fmt::format("shard \"{}\" is duplicated", shard.file);
    if (shard.bytes > kMaxNumber) return fmt::format("shard \"{}\": \"bytes\" is too large", shard.file);
    if (shard.commit != 0 && (manifest.unit_bytes == 0 || shard.commit > kMaxNumber)) {
      return fmt::format("shard \"{}\": \"commit\" is too large, or the feature \"incremental\" is missing",
                         shard.file);
    }
    const std::uint64_t chunks = chunks_of(shard.bytes, manifest.chunk_bytes);
    if (shard.crc32c.size() != chunks) {
      return fmt::format("shard \"{}\": it has {} checksums, but {} bytes have {} chunks", shard.file,
                         shard.crc32c.size(), shard.bytes, chunks);
    }
  }
  return std::nullopt;
}

// `units`: how many the tensor has.
std::optional<std::string_view> objection_to(const std::vector<DigestRun>& runs, std::uint64_t units) {
  std::uint64_t end = 0;
  for (const DigestRun& run : runs) {
    if (run.digests.empty()) return "\"digests\" has an entry without any";
    if (run.first < end) return "\"digests\" are not ascending";
    if (run.first > units || run.digests.size() > units - run.first)
      return "\"digests\" has more units than the tensor";
    end = run.first + run.digests.size();
  }
  return std::nullopt;
}

Objection of_tensor(const Manifest& manifest, const Tensor& tensor) {
  const auto object = [&](std::string_view why) {
    return fmt::format("tensor \"{}\": {}", tensor.name, why);
  };
  if (tensor.dtype.empty() || tensor.dtype.size() > kMaxDtypeBytes)
    return object(fmt::format("\"dtype\" is not 1 .. {} bytes long", kMaxDtypeBytes));
  if (std::ranges::any_of(tensor.shape, [](std::uint64_t extent) { return extent > kMaxNumber; }))
    return object("\"shape\" has a number that is too large");
  std::uint64_t total = 0;
  for (const Piece& piece : tensor.pieces) {
    if (piece.shard >= manifest.shards.size())
      return object(fmt::format("shard {} does not exist", piece.shard));
    const std::uint64_t limit = manifest.shards[piece.shard].bytes;
    if (piece.offset > limit || piece.bytes > limit - piece.offset) {
      return object(fmt::format("its piece of {} bytes at {} is not within the {} bytes of shard {}",
                                piece.bytes, piece.offset, limit, piece.shard));
    }
    if (__builtin_add_overflow(total, piece.bytes, &total)) return object("its pieces overflow");
  }
  if (manifest.unit_bytes == 0 && !tensor.digests.empty())
    return object("it has \"digests\", and the feature \"incremental\" is missing");
  if (manifest.unit_bytes != 0) {
    if (const auto why = objection_to(tensor.digests, chunks_of(total, manifest.unit_bytes)))
      return object(*why);
  }
  // The sizes of other dtypes are up to whoever introduced them.
  const auto dtype = format::dtype_named(tensor.dtype);
  if (dtype && format::tensor_bytes(*dtype, tensor.shape) != total)
    return object(fmt::format("its pieces have {} bytes, which does not match its shape and dtype", total));
  return std::nullopt;
}

Objection of_tensors(const Manifest& manifest) {
  std::unordered_set<std::string_view> names;
  for (const Tensor& tensor : manifest.tensors) {
    if (!names.insert(tensor.name).second) return fmt::format("tensor \"{}\" is duplicated", tensor.name);
    if (auto why = of_tensor(manifest, tensor)) return why;
  }
  return std::nullopt;
}

}  // namespace

std::uint64_t chunks_of(std::uint64_t bytes, std::uint64_t chunk_bytes) {
  return bytes / chunk_bytes + (bytes % chunk_bytes == 0 ? 0 : 1);
}

std::uint64_t bytes_written(const Manifest& manifest) {
  std::uint64_t bytes = 0;
  for (const Shard& shard : manifest.shards) bytes += shard.commit == 0 ? shard.bytes : 0;
  return bytes;
}

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name.size() <= kMaxNameBytes && name != "." && name != ".." &&
         name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

std::optional<std::string> objection_to(const Manifest& manifest) {
  for (const auto check : {of_numbers, of_features, of_volumes, of_shards, of_tensors}) {
    if (auto why = check(manifest)) return why;
  }
  return std::nullopt;
}

}  // namespace trunkline::checkpoint
