#include "checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "base/strict_json.h"
#include "checkpoint/manifest_check.h"
#include "trunkline/checksum.h"

namespace trunkline::checkpoint {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr std::string_view kMagic = "trunkline checkpoint ";
constexpr std::size_t kMaxLineBytes = 128;  // of a line of any version
constexpr int kMaxDepth = 500;              // of the whole text, to which users' state adds
constexpr std::size_t kCrcDigits = 8;

constexpr std::array<std::string_view, 10> kKeys{"step",    "commit", "time",    "chunk_bytes", "world_size",
                                                 "volumes", "shards", "tensors", "features",    "state"};
constexpr std::array<std::string_view, 4> kShardKeys{"volume", "file", "bytes", "crc32c"};
constexpr std::array<std::string_view, 4> kTensorKeys{"name", "dtype", "shape", "pieces"};

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

// What a member is not; thrown and caught within this file, so that each member is one line.
struct Refusal {
  std::string why;
};

const Json& member(const Json& object, std::string_view key) {
  const auto found = object.find(key);
  if (found == object.end()) throw Refusal{fmt::format("\"{}\" is missing", key)};
  return *found;
}

std::uint64_t number(const Json& value, std::string_view what) {
  if (!value.is_number_unsigned()) throw Refusal{fmt::format("\"{}\" is not an integer from 0", what)};
  return value.get<std::uint64_t>();
}

std::uint64_t number_of(const Json& object, std::string_view key) { return number(member(object, key), key); }

const std::string& text(const Json& value, std::string_view what) {
  if (!value.is_string()) throw Refusal{fmt::format("\"{}\" is no string", what)};
  return value.get_ref<const std::string&>();
}

const std::string& text_of(const Json& object, std::string_view key) {
  return text(member(object, key), key);
}

const Json& array_of(const Json& object, std::string_view key) {
  const Json& value = member(object, key);
  if (!value.is_array()) throw Refusal{fmt::format("\"{}\" is no array", key)};
  return value;
}

void check_keys(const Json& object, std::span<const std::string_view> known, std::string_view what) {
  if (!object.is_object()) throw Refusal{fmt::format("{} is no object", what)};
  for (const auto& item : object.items()) {
    if (std::ranges::find(known, item.key()) == known.end())
      throw Refusal{fmt::format("unknown key \"{}\" of {}", item.key(), what)};
  }
}

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
    if (!value) throw Refusal{"\"crc32c\" is not 8 lower-case hexadecimal digits a chunk"};
    values.push_back(*value);
  }
  return values;
}

Shard shard_of(const Json& json) {
  check_keys(json, kShardKeys, "a shard");
  return {.volume = number_of(json, "volume"),
          .file = text_of(json, "file"),
          .bytes = number_of(json, "bytes"),
          .crc32c = crcs_of(text_of(json, "crc32c"))};
}

Piece piece_of(const Json& json) {
  if (!json.is_array() || json.size() != 3) throw Refusal{"a piece is not [shard, offset, bytes]"};
  return {.shard = number(json[0], "pieces"),
          .offset = number(json[1], "pieces"),
          .bytes = number(json[2], "pieces")};
}

Tensor tensor_of(const Json& json) {
  check_keys(json, kTensorKeys, "a tensor");
  Tensor tensor{.name = text_of(json, "name"), .dtype = text_of(json, "dtype"), .shape = {}, .pieces = {}};
  for (const Json& extent : array_of(json, "shape")) tensor.shape.push_back(number(extent, "shape"));
  for (const Json& piece : array_of(json, "pieces")) tensor.pieces.push_back(piece_of(piece));
  return tensor;
}

// First of all: what comes with features that are not known here need not look as expected.
std::vector<std::string> features_of(const Json& json) {
  std::vector<std::string> features;
  if (!json.contains("features")) return features;
  for (const Json& feature : array_of(json, "features")) {
    const std::string& name = text(feature, "features");
    if (name != kViewsFeature) {
      throw Refusal{fmt::format(
          "it needs the feature \"{}\", which this build does not have; upgrade trunkline to load it", name)};
    }
    features.push_back(name);
  }
  if (features.empty()) throw Refusal{"\"features\" is empty"};
  return features;
}

Manifest manifest_of(const Json& json, std::string_view source) {
  std::vector<std::string> features = features_of(json);
  check_keys(json, kKeys, "the manifest");
  Manifest manifest{.step = number_of(json, "step"),
                    .commit = number_of(json, "commit"),
                    .time = text_of(json, "time"),
                    .chunk_bytes = number_of(json, "chunk_bytes"),
                    .world_size = number_of(json, "world_size")};
  for (const Json& volume : array_of(json, "volumes")) manifest.volumes.push_back(text(volume, "volumes"));
  for (const Json& shard : array_of(json, "shards")) manifest.shards.push_back(shard_of(shard));
  for (const Json& tensor : array_of(json, "tensors")) manifest.tensors.push_back(tensor_of(tensor));
  manifest.features = std::move(features);
  manifest.state = member_text(source, "state");
  if (manifest.state.empty()) throw Refusal{"\"state\" is missing"};
  return manifest;
}

OrderedJson json_of(const Shard& shard) {
  std::string digits;
  digits.reserve(shard.crc32c.size() * kCrcDigits);
  for (const std::uint32_t crc : shard.crc32c) fmt::format_to(std::back_inserter(digits), "{:08x}", crc);
  return {
      {"volume", shard.volume}, {"file", shard.file}, {"bytes", shard.bytes}, {"crc32c", std::move(digits)}};
}

OrderedJson json_of(const Tensor& tensor) {
  OrderedJson pieces = OrderedJson::array();
  for (const Piece& piece : tensor.pieces)
    pieces.push_back(OrderedJson::array({piece.shard, piece.offset, piece.bytes}));
  return {
      {"name", tensor.name}, {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"pieces", std::move(pieces)}};
}

template <class T>
OrderedJson json_of(const std::vector<T>& values) {
  OrderedJson array = OrderedJson::array();
  for (const T& value : values) array.push_back(json_of(value));
  return array;
}

// All but the state; its closing brace is the last character.
std::string dump_without_state(const Manifest& manifest) {
  OrderedJson json = {{"step", manifest.step},
                      {"commit", manifest.commit},
                      {"time", manifest.time},
                      {"chunk_bytes", manifest.chunk_bytes},
                      {"world_size", manifest.world_size},
                      {"volumes", manifest.volumes},
                      {"shards", json_of(manifest.shards)},
                      {"tensors", json_of(manifest.tensors)}};
  if (!manifest.features.empty()) json["features"] = manifest.features;
  return json.dump();
}

std::unexpected<Error> invalid(std::string_view why) {
  return std::unexpected(make_error(ErrorKind::invalid_argument, fmt::format("manifest: {}", why)));
}

// The number that the line has at `at`, which is moved behind it; canonical digits only.
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
  return fmt::format("{}{} crc32c={:08x} bytes={}\n{}", kMagic, version,
                     crc32c(std::as_bytes(std::span(json))), json.size(), json);
}

Result<FramedManifest> unframe_manifest(std::string_view text, const std::string& path) {
  const std::string_view head = text.substr(0, kMaxLineBytes);
  std::size_t at = 0;
  if (head.empty()) return damaged(path, "it is empty");
  if (!take(head, at, kMagic)) return refuse(path, "it does not begin with \"trunkline checkpoint\"");
  const auto version = take_number(head, at);
  if (!version || *version == 0 || !take(head, at, " "))
    return refuse(path, "its first line names no version");
  if (*version > kFeatureVersion) {
    return std::unexpected(make_error(
        ErrorKind::format,
        fmt::format(
            "{} is the manifest of a checkpoint of a newer version, {}, and this build reads versions "
            "up to {}; upgrade trunkline to load it",
            path, *version, kFeatureVersion),
        path));
  }
  if (!take(head, at, "crc32c=")) return refuse(path, "its first line names no checksum");
  const auto crc = crc_of(head.substr(at, kCrcDigits));
  at = std::min(at + kCrcDigits, head.size());
  if (!crc || !take(head, at, " bytes=")) return refuse(path, "its first line names no checksum or no size");
  const auto bytes = take_number(head, at);
  if (!bytes || !take(head, at, "\n")) return refuse(path, "its first line names no size");
  const std::string_view json = text.substr(at);
  if (json.size() != *bytes) {
    return damaged(path, fmt::format("{} bytes follow its first line, which says {}: it was cut or grew",
                                     json.size(), *bytes));
  }
  const std::uint32_t found = crc32c(std::as_bytes(std::span(json)));
  if (found != *crc) {
    return damaged(path, fmt::format("its CRC-32C is {:08x}, and its first line says {:08x}: bytes of it "
                                     "have changed since it was written",
                                     found, *crc));
  }
  return FramedManifest{.version = *version, .json = json};
}

Result<std::string> manifest_to_json(const Manifest& manifest) {
  if (const auto why = objection_to(manifest)) return invalid(*why);
  const auto state = parse_json_object(fmt::format(R"({{"state":{}}})", manifest.state), kMaxDepth);
  if (!state) return invalid(fmt::format("\"state\": {}", state.error()));
  if (state->size() != 1) return invalid("\"state\": it is not one JSON value");
  try {
    std::string json = dump_without_state(manifest);
    json.pop_back();
    return json + R"(,"state":)" + manifest.state + "}";
  } catch (const Json::type_error&) {
    return invalid("a name or path in it is not valid UTF-8");
  }
}

std::expected<Manifest, std::string> manifest_from_text(std::string_view json) {
  const auto parsed = parse_json_object(json, kMaxDepth);
  if (!parsed) return std::unexpected(parsed.error());
  try {
    Manifest manifest = manifest_of(*parsed, json);
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
  return frame_manifest(*json, manifest.features.empty() ? kFirstVersion : kFeatureVersion);
}

Result<Manifest> parse_manifest(std::string_view text, const std::string& path) {
  const auto framed = unframe_manifest(text, path);
  if (!framed) return std::unexpected(framed.error());
  auto manifest = manifest_from_json(framed->json, path);
  if (manifest && manifest->features.empty() != (framed->version == kFirstVersion))
    return refuse(path, fmt::format("\"features\" do not go with its version, {}", framed->version));
  return manifest;
}

}  // namespace trunkline::checkpoint
