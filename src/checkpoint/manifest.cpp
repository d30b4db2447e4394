#include "checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/strict_json.h"
#include "checkpoint/manifest_check.h"
#include "trunkline/checksum.h"

namespace trunkline::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kManifestMagic = "trunkline checkpoint ";
constexpr int kMaxManifestDepth = 500;  // of the whole text, including users' state
constexpr std::size_t kCrcDigits = 8;

constexpr std::array<std::string_view, 12> kKeys{"step",        "commit",     "time",       "metrics",
                                                 "chunk_bytes", "unit_bytes", "world_size", "volumes",
                                                 "shards",      "tensors",    "features",   "state"};
constexpr std::array<std::string_view, 5> kShardKeys{"volume", "file", "bytes", "crc32c", "commit"};
constexpr std::array<std::string_view, 5> kTensorKeys{"name", "dtype", "shape", "pieces", "digests"};
constexpr std::size_t kDigestDigits = 32;

std::unexpected<Error> refuse(const std::string& path, std::string_view why) {
  return std::unexpected(make_error(
      ErrorKind::format,
      fmt::format("{} is not the manifest of a checkpoint: {}; use another step, or restore it from a copy",
                  path, why),
      path));
}

std::unexpected<Error> damaged(const std::string& path, std::string_view why) {
  return std::unexpected(make_error(
      ErrorKind::corrupt,
      fmt::format("manifest {}: {}; use another step, or restore it from a copy", path, why), path));
}

// Why a member is invalid; thrown and caught within this file, so that each member is parsed in one line.
struct Refusal {
  std::string why;
};

// A JSON value as its text: for a manifest with a million tensors, a tree of values would take seconds and
// gigabytes.
using Text = std::string_view;

// The members of an object.
class Object {
 public:
  Object(Text text, std::string_view what) : what_(what) {
    if (!text.starts_with('{')) throw Refusal{fmt::format("{} is not an object", what)};
    members_ = members_of(text);
  }
  void check_keys(std::span<const std::string_view> known) const {
    for (const auto& [key, value] : members_) {
      if (std::ranges::find(known, key) == known.end())
        throw Refusal{fmt::format("unknown key \"{}\" of {}", key, what_)};
    }
  }
  std::optional<Text> find(std::string_view key) const {
    for (const auto& [name, value] : members_) {
      if (name == key) return value;
    }
    return std::nullopt;
  }
  Text at(std::string_view key) const {
    if (const auto value = find(key)) return *value;
    throw Refusal{fmt::format("\"{}\" is missing", key)};
  }

 private:
  std::string_view what_;
  std::vector<std::pair<std::string_view, Text>> members_;
};

std::uint64_t number(Text value, std::string_view what) {
  std::uint64_t result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size())
    throw Refusal{fmt::format("\"{}\" is not an integer from 0", what)};
  return result;
}

std::uint64_t number_of(const Object& object, std::string_view key) { return number(object.at(key), key); }

std::string text(Text value, std::string_view what) {
  if (!value.starts_with('"')) throw Refusal{fmt::format("\"{}\" is not a string", what)};
  if (value.find('\\') == Text::npos) return std::string(value.substr(1, value.size() - 2));
  return Json::parse(value.begin(), value.end()).get<std::string>();
}

std::string text_of(const Object& object, std::string_view key) { return text(object.at(key), key); }

std::vector<Text> array(Text value, std::string_view what) {
  if (!value.starts_with('[')) throw Refusal{fmt::format("\"{}\" is not an array", what)};
  return items_of(value);
}

std::vector<Text> array_of(const Object& object, std::string_view key) { return array(object.at(key), key); }

std::optional<std::uint32_t> crc_of(std::string_view digits) {
  if (digits.size() != kCrcDigits || digits.find_first_not_of("0123456789abcdef") != std::string_view::npos)
    return std::nullopt;
  std::uint32_t value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  return value;
}

std::vector<std::uint32_t> crcs_of(const std::string& digits) {
  std::vector<std::uint32_t> values;
  values.reserve(digits.size() / kCrcDigits);
  for (std::size_t at = 0; at < digits.size(); at += kCrcDigits) {
    const auto value = crc_of(std::string_view(digits).substr(at, kCrcDigits));
    if (!value) throw Refusal{"\"crc32c\" is not 8 lower-case hexadecimal digits per chunk"};
    values.push_back(*value);
  }
  return values;
}

// 0 where the key is missing.
std::uint64_t optional_number_of(const Object& object, std::string_view key) {
  const auto value = object.find(key);
  if (!value) return 0;
  const std::uint64_t found = number(*value, key);
  if (found == 0) throw Refusal{fmt::format("\"{}\" is 0", key)};
  return found;
}

std::uint64_t hex64(std::string_view digits) {
  std::uint64_t value = 0;
  if (digits.find_first_not_of("0123456789abcdef") != std::string_view::npos)
    throw Refusal{"\"digests\" is not 32 lower-case hexadecimal digits per unit"};
  std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  return value;
}

DigestRun digest_run_of(Text json) {
  const std::vector<Text> parts = json.starts_with('[') ? items_of(json) : std::vector<Text>();
  if (parts.size() != 2) throw Refusal{"\"digests\" has an entry that is not [first, digests]"};
  DigestRun run{.first = number(parts[0], "digests"), .digests = {}};
  const std::string digits = text(parts[1], "digests");
  if (digits.size() % kDigestDigits != 0)
    throw Refusal{"\"digests\" is not 32 lower-case hexadecimal digits per unit"};
  run.digests.reserve(digits.size() / kDigestDigits);
  for (std::size_t at = 0; at < digits.size(); at += kDigestDigits) {
    const std::string_view both = std::string_view(digits).substr(at, kDigestDigits);
    run.digests.push_back({.ecma = hex64(both.substr(0, 16)), .jones = hex64(both.substr(16))});
  }
  return run;
}

Shard shard_in(Text json) {
  const Object shard(json, "a shard");
  shard.check_keys(kShardKeys);
  return {.volume = number_of(shard, "volume"),
          .file = text_of(shard, "file"),
          .bytes = number_of(shard, "bytes"),
          .crc32c = crcs_of(text_of(shard, "crc32c")),
          .commit = optional_number_of(shard, "commit")};
}

Piece piece_of(Text json) {
  const std::vector<Text> parts = json.starts_with('[') ? items_of(json) : std::vector<Text>();
  if (parts.size() != 3) throw Refusal{"a piece is not [shard, offset, bytes]"};
  return {.shard = number(parts[0], "pieces"),
          .offset = number(parts[1], "pieces"),
          .bytes = number(parts[2], "pieces")};
}

Tensor tensor_of(Text json) {
  const Object object(json, "a tensor");
  object.check_keys(kTensorKeys);
  Tensor tensor{
      .name = text_of(object, "name"), .dtype = text_of(object, "dtype"), .shape = {}, .pieces = {}};
  for (const Text extent : array_of(object, "shape")) tensor.shape.push_back(number(extent, "shape"));
  for (const Text piece : array_of(object, "pieces")) tensor.pieces.push_back(piece_of(piece));
  if (const auto digests = object.find("digests")) {
    for (const Text run : array(*digests, "digests")) tensor.digests.push_back(digest_run_of(run));
    if (tensor.digests.empty()) throw Refusal{"\"digests\" is empty"};
  }
  return tensor;
}

// Checked first: what comes with unknown features need not look as expected.
std::vector<std::string> features_of(const Object& object) {
  std::vector<std::string> features;
  const auto value = object.find("features");
  if (!value) return features;
  for (const Text feature : array(*value, "features")) {
    std::string name = text(feature, "features");
    if (name != kViewsFeature && name != kMetricsFeature && name != kIncrementalFeature) {
      throw Refusal{fmt::format(
          "it needs the feature \"{}\", which this build does not have; upgrade trunkline to load it", name)};
    }
    features.push_back(std::move(name));
  }
  if (features.empty()) throw Refusal{"\"features\" is empty"};
  return features;
}

// JSON has no numbers for these. A NaN has no sign and no payload.
constexpr std::pair<std::string_view, double> kNoNumbers[] = {
    {R"("NaN")", std::numeric_limits<double>::quiet_NaN()},
    {R"("Infinity")", std::numeric_limits<double>::infinity()},
    {R"("-Infinity")", -std::numeric_limits<double>::infinity()}};

double metric_of(Text value, std::string_view name) {
  for (const auto& [written, no_number] : kNoNumbers) {
    if (value == written) return no_number;
  }
  double result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size())
    throw Refusal{fmt::format("the metric \"{}\" is not a number", name)};
  return result;
}

std::vector<Metric> metrics_of(const Object& manifest) {
  std::vector<Metric> metrics;
  const auto value = manifest.find("metrics");
  if (!value) return metrics;
  if (!value->starts_with('{')) throw Refusal{"\"metrics\" is not an object"};
  for (const auto& [written, number] : members_of(*value)) {
    std::string name = text(fmt::format("\"{}\"", written), "metrics");
    metrics.push_back({.name = std::move(name), .value = metric_of(number, written)});
  }
  return metrics;
}

Manifest manifest_of(Text json) {
  const Object object(json.substr(json.find('{')), "the manifest");
  std::vector<std::string> features = features_of(object);
  object.check_keys(kKeys);
  Manifest manifest{.step = number_of(object, "step"),
                    .commit = number_of(object, "commit"),
                    .time = text_of(object, "time"),
                    .metrics = metrics_of(object),
                    .chunk_bytes = number_of(object, "chunk_bytes"),
                    .unit_bytes = optional_number_of(object, "unit_bytes"),
                    .world_size = number_of(object, "world_size")};
  for (const Text volume : array_of(object, "volumes")) manifest.volumes.push_back(text(volume, "volumes"));
  for (const Text shard : array_of(object, "shards")) manifest.shards.push_back(shard_in(shard));
  for (const Text tensor : array_of(object, "tensors")) manifest.tensors.push_back(tensor_of(tensor));
  manifest.features = std::move(features);
  manifest.state = object.at("state");
  return manifest;
}

using Output = fmt::memory_buffer;

void append(Output& out, std::string_view characters) {
  out.append(characters.data(), characters.data() + characters.size());
}

// Throws Json::type_error for invalid UTF-8.
void append_string(Output& out, std::string_view value) {
  const bool plain =
      std::ranges::all_of(value, [](char c) { return c >= ' ' && c < '\x7f' && c != '"' && c != '\\'; });
  if (!plain) return append(out, Json(value).dump());
  out.push_back('"');
  append(out, value);
  out.push_back('"');
}

// `each` appends one value.
template <class T, class Each>
void append_array(Output& out, const std::vector<T>& values, const Each& each) {
  out.push_back('[');
  bool first = true;
  for (const T& value : values) {
    if (!std::exchange(first, false)) out.push_back(',');
    each(out, value);
  }
  out.push_back(']');
}

void append_number(Output& out, std::uint64_t value) { append(out, fmt::format_int(value).c_str()); }

void append_metric(Output& out, const Metric& metric) {
  append_string(out, metric.name);
  out.push_back(':');
  if (std::isnan(metric.value))
    append(out, R"("NaN")");
  else if (std::isinf(metric.value))
    append(out, metric.value > 0 ? R"("Infinity")" : R"("-Infinity")");
  else
    fmt::format_to(std::back_inserter(out), "{}", metric.value);
}

void append_shard(Output& out, const Shard& shard) {
  fmt::format_to(std::back_inserter(out), R"({{"volume":{},"file":)", shard.volume);
  append_string(out, shard.file);
  fmt::format_to(std::back_inserter(out), R"(,"bytes":{},"crc32c":")", shard.bytes);
  for (const std::uint32_t crc : shard.crc32c) fmt::format_to(std::back_inserter(out), "{:08x}", crc);
  out.push_back('"');
  if (shard.commit != 0) fmt::format_to(std::back_inserter(out), R"(,"commit":{})", shard.commit);
  out.push_back('}');
}

void append_hex64(Output& out, std::uint64_t value) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  for (unsigned shift = 64; shift > 0; shift -= 4) out.push_back(kDigits[(value >> (shift - 4)) & 15]);
}

void append_digest_run(Output& out, const DigestRun& run) {
  fmt::format_to(std::back_inserter(out), "[{},\"", run.first);
  for (const Digest& digest : run.digests) {
    append_hex64(out, digest.ecma);
    append_hex64(out, digest.jones);
  }
  append(out, "\"]");
}

void append_tensor(Output& out, const Tensor& tensor) {
  append(out, R"({"name":)");
  append_string(out, tensor.name);
  append(out, R"(,"dtype":)");
  append_string(out, tensor.dtype);
  append(out, R"(,"shape":)");
  append_array(out, tensor.shape, append_number);
  append(out, R"(,"pieces":)");
  append_array(out, tensor.pieces, [](Output& to, const Piece& piece) {
    fmt::format_to(std::back_inserter(to), "[{},{},{}]", piece.shard, piece.offset, piece.bytes);
  });
  if (!tensor.digests.empty()) {
    append(out, R"(,"digests":)");
    append_array(out, tensor.digests, append_digest_run);
  }
  out.push_back('}');
}

// The order of the keys is that of version 1, with the state last. "step" comes first: shard_references.cpp
// uses it to see which step a manifest is of (docs/formats/checkpoint.md).
std::string json_of(const Manifest& manifest) {
  Output out;
  fmt::format_to(std::back_inserter(out), R"({{"step":{},"commit":{},"time":)", manifest.step,
                 manifest.commit);
  append_string(out, manifest.time);
  if (!manifest.metrics.empty()) {
    append(out, R"(,"metrics":{)");
    for (const Metric& metric : manifest.metrics) {
      if (&metric != &manifest.metrics.front()) out.push_back(',');
      append_metric(out, metric);
    }
    out.push_back('}');
  }
  fmt::format_to(std::back_inserter(out), R"(,"chunk_bytes":{})", manifest.chunk_bytes);
  if (manifest.unit_bytes != 0)
    fmt::format_to(std::back_inserter(out), R"(,"unit_bytes":{})", manifest.unit_bytes);
  fmt::format_to(std::back_inserter(out), R"(,"world_size":{},"volumes":)", manifest.world_size);
  append_array(out, manifest.volumes, append_string);
  append(out, R"(,"shards":)");
  append_array(out, manifest.shards, append_shard);
  append(out, R"(,"tensors":)");
  append_array(out, manifest.tensors, append_tensor);
  if (!manifest.features.empty()) {
    append(out, R"(,"features":)");
    append_array(out, manifest.features, append_string);
  }
  append(out, R"(,"state":)");
  append(out, manifest.state);
  out.push_back('}');
  return fmt::to_string(out);
}

std::unexpected<Error> invalid_manifest(std::string_view why) {
  return std::unexpected(make_error(ErrorKind::invalid_argument, fmt::format("manifest: {}", why)));
}

// The number at position `at` of the line; `at` is moved past it. Accepts canonical digits only.
std::optional<std::uint64_t> take_number(std::string_view line, std::size_t& at) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(line.data() + at, line.data() + line.size(), value);
  const auto digits = static_cast<std::size_t>(end - (line.data() + at));
  if (error != std::errc() || digits == 0 || (digits > 1 && line[at] == '0')) return std::nullopt;
  at += digits;
  return value;
}

bool take(std::string_view line, std::size_t& at, std::string_view expected) {
  if (line.substr(at, expected.size()) != expected) return false;
  at += expected.size();
  return true;
}

}  // namespace

std::string frame_manifest(std::string_view json, std::uint64_t version) {
  return fmt::format("{}{} crc32c={:08x} bytes={}\n{}", kManifestMagic, version,
                     crc32c(std::as_bytes(std::span(json))), json.size(), json);
}

namespace {

struct FirstLine {
  std::uint64_t version = 0;
  std::uint32_t crc = 0;
  std::uint64_t end = 0;  // where the JSON begins
};

// For a manifest of `file_bytes`, which begins with `text`.
Result<FirstLine> first_line_of(std::string_view text, std::uint64_t file_bytes, const std::string& path) {
  const std::string_view head = text.substr(0, kMaxLineBytes);
  std::size_t at = 0;
  if (head.empty()) return damaged(path, "it is empty");
  if (!take(head, at, kManifestMagic)) return refuse(path, "it does not begin with \"trunkline checkpoint\"");
  const auto version = take_number(head, at);
  if (!version || *version == 0 || !take(head, at, " "))
    return refuse(path, "its first line does not name a version");
  if (*version > kFeatureVersion) {
    return std::unexpected(
        make_error(ErrorKind::format,
                   fmt::format("{} is the manifest of a checkpoint of a newer version, {}, but this build "
                               "reads versions up to {}; upgrade trunkline to load it",
                               path, *version, kFeatureVersion),
                   path));
  }
  if (!take(head, at, "crc32c=")) return refuse(path, "its first line does not name a checksum");
  const auto crc = crc_of(head.substr(at, kCrcDigits));
  at = std::min(at + kCrcDigits, head.size());
  if (!crc || !take(head, at, " bytes="))
    return refuse(path, "its first line does not name a checksum and a size");
  const auto bytes = take_number(head, at);
  if (!bytes || !take(head, at, "\n")) return refuse(path, "its first line does not name a size");
  if (file_bytes - at != *bytes) {
    return damaged(
        path, fmt::format("{} bytes follow its first line, which says {}: the file was truncated or extended",
                          file_bytes - at, *bytes));
  }
  if (*bytes > kMaxManifestBytes)
    return refuse(path,
                  fmt::format("it has {} bytes, but a manifest has at most {}", *bytes, kMaxManifestBytes));
  return FirstLine{.version = *version, .crc = *crc, .end = at};
}

}  // namespace

std::string_view first_line(std::string_view beginning) {
  return beginning.substr(0, kMaxLineBytes).substr(0, beginning.find('\n'));
}

Status check_first_line(std::string_view beginning, std::uint64_t file_bytes, const std::string& path) {
  const auto line = first_line_of(beginning, file_bytes, path);
  return line ? Status() : std::unexpected(line.error());
}

Result<FramedManifest> unframe_manifest(std::string_view text, const std::string& path) {
  const auto line = first_line_of(text, text.size(), path);
  if (!line) return std::unexpected(line.error());
  const std::string_view json = text.substr(line->end);
  const std::uint32_t found = crc32c(std::as_bytes(std::span(json)));
  if (found != line->crc) {
    return damaged(
        path,
        fmt::format(
            "its CRC-32C is {:08x}, but its first line says {:08x}: it has changed since it was written",
            found, line->crc));
  }
  return FramedManifest{.version = line->version, .json = json};
}

Result<std::string> manifest_to_json(const Manifest& manifest) {
  if (const auto why = objection_to(manifest)) return invalid_manifest(*why);
  const std::string state = fmt::format(R"({{"state":{}}})", manifest.state);
  if (const auto why = objection_to_json_object(state, kMaxManifestDepth))
    return invalid_manifest(fmt::format("\"state\": {}", *why));
  if (members_of(state).size() != 1) return invalid_manifest("\"state\" is not a single JSON value");
  try {
    return json_of(manifest);
  } catch (const Json::type_error&) {
    return invalid_manifest("a name or path in it is not valid UTF-8");
  }
}

std::expected<Manifest, std::string> manifest_from_text(std::string_view json) {
  if (auto why = objection_to_json_object(json, kMaxManifestDepth)) return std::unexpected(std::move(*why));
  try {
    Manifest manifest = manifest_of(json);
    if (auto why = objection_to(manifest)) return std::unexpected(std::move(*why));
    return manifest;
  } catch (const Refusal& refusal) {
    return std::unexpected(refusal.why);
  }
}

Result<Manifest> manifest_from_json(std::string_view json, const std::string& path) {
  auto manifest = manifest_from_text(json);
  if (!manifest) return refuse(path, manifest.error());
  return std::move(*manifest);
}

Result<std::string> format_manifest(const Manifest& manifest) {
  auto json = manifest_to_json(manifest);
  if (!json) return json;
  if (json->size() > kMaxManifestBytes) {
    return invalid_manifest(
        fmt::format("the manifest would have {} bytes, but readers accept at most {}; save a state with "
                    "fewer tensors and values",
                    json->size(), kMaxManifestBytes));
  }
  return frame_manifest(*json, manifest.features.empty() ? kFirstVersion : kFeatureVersion);
}

Result<Manifest> parse_manifest(std::string_view text, const std::string& path) {
  const auto framed = unframe_manifest(text, path);
  if (!framed) return std::unexpected(framed.error());
  auto manifest = manifest_from_json(framed->json, path);
  if (manifest && manifest->features.empty() != (framed->version == kFirstVersion))
    return refuse(path, fmt::format("\"features\" do not match its version, {}", framed->version));
  return manifest;
}

}  // namespace trunkline::checkpoint
