#include "checkpoint/tier_record.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/strict_json.h"
#include "checkpoint/json_record.h"

namespace trunkline::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kTierFormat = "trunkline tiers";
constexpr unsigned kTierVersion = 2;
constexpr int kMaxTierDepth = 3;

std::unexpected<Error> not_tiers(ErrorKind kind, const std::string& path, std::string_view why) {
  return std::unexpected(make_error(
      kind,
      fmt::format("{} does not describe tiers: {}; restore it from a copy, or remove it: the checkpoints can "
                  "be loaded without it",
                  path, why),
      path));
}

std::optional<std::string> text_of(const Json& json, std::string_view key) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_string()) return std::nullopt;
  return found->get<std::string>();
}

std::optional<RecordedTier> tier_of(const Json& json) {
  if (!json.is_object()) return std::nullopt;
  auto directory = text_of(json, "directory");
  auto id = text_of(json, "id");
  if (!directory || !id || !directory->starts_with('/') || directory->contains('\0')) return std::nullopt;
  if (!id->empty() && !is_id(*id)) return std::nullopt;
  return RecordedTier{.directory = *std::move(directory), .id = *std::move(id)};
}

}  // namespace

Result<std::string> format_tier_record(const TierRecord& record) {
  nlohmann::ordered_json json = {
      {"format", kTierFormat}, {"version", kTierVersion}, {"id", record.id}, {"identity", record.identity}};
  json["tiers"] = nlohmann::ordered_json::array();
  for (const RecordedTier& tier : record.tiers)
    json["tiers"].push_back({{"directory", tier.directory}, {"id", tier.id}});
  return format_json_record(std::move(json), "tiers");
}

Result<TierRecord> parse_tier_record(std::string_view text, const std::string& path) {
  const auto json = parse_json_object(text, kMaxTierDepth);
  if (!json) return not_tiers(ErrorKind::format, path, json.error());
  if (text_of(*json, "format") != kTierFormat)
    return not_tiers(ErrorKind::format, path, fmt::format("\"format\" is not \"{}\"", kTierFormat));
  // Before the other fields, which another version may have changed.
  const auto version = json->find("version");
  if (version == json->end() || !version->is_number_unsigned() || *version < kTierVersion)
    return not_tiers(ErrorKind::format, path, fmt::format("\"version\" is not {}", kTierVersion));
  if (*version > kTierVersion) {
    return not_tiers(
        ErrorKind::format, path,
        fmt::format("it is of a newer version, {}, and this build reads version {}; upgrade trunkline",
                    version->dump(), kTierVersion));
  }
  auto id = text_of(*json, "id");
  if (!id || !is_id(*id))
    return not_tiers(ErrorKind::format, path, "\"id\" is not 16 lower-case hexadecimal digits");
  const auto identity = json->find("identity");
  if (identity == json->end() || !identity->is_number_unsigned())
    return not_tiers(ErrorKind::format, path, "\"identity\" is not a whole number");
  const auto tiers = json->find("tiers");
  if (tiers == json->end() || !tiers->is_array())
    return not_tiers(ErrorKind::format, path, "\"tiers\" is not an array");
  TierRecord record{.id = *std::move(id), .identity = identity->get<std::uint64_t>(), .tiers = {}};
  for (const Json& each : *tiers) {
    auto tier = tier_of(each);
    if (!tier)
      return not_tiers(ErrorKind::format, path, "a tier has no absolute \"directory\" or no valid \"id\"");
    record.tiers.push_back(*std::move(tier));
  }
  // Covers the checksum, and keys that are not known.
  if (format_tier_record(record) != text) {
    return not_tiers(ErrorKind::corrupt, path,
                     "it is not byte for byte as it was written: it was damaged or edited");
  }
  return record;
}

}  // namespace trunkline::checkpoint
