#include "tuning/tuning_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "base/strict_json.h"

namespace trunkline::tuning {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr std::string_view kFormat = "trunkline-tuning";
constexpr std::uint64_t kVersion = 1;
constexpr int kMaxDepth = 5;  // the file, its tunings, one of them, its storages, one of them
constexpr std::size_t kMaxTextBytes = 4096;

// What is wrong with the file, as a phrase; the position in it is added on the way up.
using Objection = std::optional<std::string>;

Objection check_keys(const Json& object, std::span<const std::string_view> keys, std::size_t required) {
  if (!object.is_object()) return "is not an object";
  for (const auto& item : object.items()) {
    if (std::ranges::find(keys, item.key()) == keys.end())
      return fmt::format("has an unknown key \"{}\"", item.key());
  }
  for (const std::string_view key : keys.first(required)) {
    if (!object.contains(std::string(key))) return fmt::format("has no \"{}\"", key);
  }
  return std::nullopt;
}

Objection take_text(const Json& object, const char* key, std::string& value) {
  const Json& found = object.at(key);
  if (!found.is_string() || found.get_ref<const std::string&>().size() > kMaxTextBytes)
    return fmt::format("\"{}\" is not a text of at most {} bytes", key, kMaxTextBytes);
  value = found.get<std::string>();
  return std::nullopt;
}

template <class Value>
Objection take_count(const Json& object, const char* key, Value& value) {
  const Json& found = object.at(key);
  if (!found.is_number_unsigned() || found.get<std::uint64_t>() > std::numeric_limits<Value>::max())
    return fmt::format("\"{}\" is not a count in range", key);
  value = found.get<Value>();
  return std::nullopt;
}

template <class Value>
Objection take_count(const Json& object, const char* key, std::optional<Value>& value) {
  if (!object.contains(key)) return std::nullopt;
  return take_count(object, key, value.emplace());
}

Objection take_settings(const Json& json, Settings& settings) {
  constexpr std::array<std::string_view, 5> kKeys{"backend", "lanes", "queue_depth", "block_bytes", "direct"};
  if (auto why = check_keys(json, kKeys, 0)) return why;
  if (json.contains("backend")) {
    std::string name;
    if (auto why = take_text(json, "backend", name)) return why;
    const auto kind = parse_backend(name);
    if (!kind) return "\"backend\" is not the name of one";
    settings.backend = *kind;
  }
  if (auto why = take_count(json, "lanes", settings.lanes)) return why;
  if (auto why = take_count(json, "queue_depth", settings.queue_depth)) return why;
  if (auto why = take_count(json, "block_bytes", settings.block_bytes)) return why;
  if (json.contains("direct")) {
    if (!json.at("direct").is_boolean()) return "\"direct\" is not a boolean";
    settings.direct = json.at("direct").get<bool>();
  }
  if (!are_valid(settings)) return "has settings that no engine supports";
  return std::nullopt;
}

Objection take_storages(const Json& json, std::vector<Storage>& storages) {
  constexpr std::array<std::string_view, 3> kKeys{"filesystem", "device", "id"};
  if (!json.is_array() || json.empty() || json.size() > kMaxStorages)
    return fmt::format("\"storages\" is not a list of 1 to {}", kMaxStorages);
  for (const Json& each : json) {
    if (auto why = check_keys(each, kKeys, kKeys.size())) return "a storage " + *why;
    Storage& storage = storages.emplace_back();
    if (auto why = take_text(each, "filesystem", storage.filesystem)) return why;
    if (auto why = take_text(each, "device", storage.device)) return why;
    if (auto why = take_text(each, "id", storage.id)) return why;
  }
  const bool sorted = std::ranges::is_sorted(storages);
  if (!sorted || std::ranges::adjacent_find(storages) != storages.end())
    return "\"storages\" are not sorted, or one is duplicated";
  return std::nullopt;
}

Objection take_rates(const Json& json, std::vector<Rates>& rates) {
  constexpr std::array<std::string_view, 3> kKeys{"pattern", "default_bytes_per_second",
                                                  "tuned_bytes_per_second"};
  if (!json.is_array() || json.size() != kPatterns)
    return fmt::format("\"measured\" is not a list of {}", kPatterns);
  for (const Json& each : json) {
    if (auto why = check_keys(each, kKeys, kKeys.size())) return "a measurement " + *why;
    std::string name;
    if (auto why = take_text(each, "pattern", name)) return why;
    if (name != pattern_name(rates.size())) return "\"pattern\" is not the one that is due";
    Rates& rate = rates.emplace_back();
    if (auto why = take_count(each, "default_bytes_per_second", rate.defaults)) return why;
    if (auto why = take_count(each, "tuned_bytes_per_second", rate.tuned)) return why;
  }
  return std::nullopt;
}

Objection take_paths(const Json& json, std::vector<std::string>& paths) {
  if (!json.is_array() || json.size() > kMaxStorages)
    return fmt::format("\"paths\" is not a list of at most {}", kMaxStorages);
  for (const Json& each : json) {
    if (!each.is_string() || each.get_ref<const std::string&>().size() > kMaxTextBytes)
      return fmt::format("a path is not a text of at most {} bytes", kMaxTextBytes);
    paths.push_back(each.get<std::string>());
  }
  return std::nullopt;
}

Objection take_tuning(const Json& json, Tuning& tuning) {
  constexpr std::array<std::string_view, 6> kKeys{"machine",  "time",     "paths",
                                                  "storages", "settings", "measured"};
  if (auto why = check_keys(json, kKeys, kKeys.size())) return why;
  if (auto why = take_text(json, "machine", tuning.machine)) return why;
  if (auto why = take_text(json, "time", tuning.time)) return why;
  if (auto why = take_paths(json.at("paths"), tuning.paths)) return why;
  if (auto why = take_storages(json.at("storages"), tuning.storages)) return why;
  if (auto why = take_settings(json.at("settings"), tuning.settings)) return why;
  return take_rates(json.at("measured"), tuning.rates);
}

OrderedJson settings_json(const Settings& settings) {
  OrderedJson json = OrderedJson::object();
  if (settings.backend) json["backend"] = trunkline::to_string(*settings.backend);
  if (settings.lanes) json["lanes"] = *settings.lanes;
  if (settings.queue_depth) json["queue_depth"] = *settings.queue_depth;
  if (settings.block_bytes) json["block_bytes"] = *settings.block_bytes;
  if (settings.direct) json["direct"] = *settings.direct;
  return json;
}

OrderedJson tuning_json(const Tuning& tuning) {
  OrderedJson storages = OrderedJson::array();
  for (const Storage& each : tuning.storages)
    storages.push_back({{"filesystem", each.filesystem}, {"device", each.device}, {"id", each.id}});
  OrderedJson measured = OrderedJson::array();
  for (const Rates& each : tuning.rates) {
    measured.push_back({{"pattern", pattern_name(measured.size())},
                        {"default_bytes_per_second", each.defaults},
                        {"tuned_bytes_per_second", each.tuned}});
  }
  return {{"machine", tuning.machine}, {"time", tuning.time},  {"paths", tuning.paths},
          {"storages", storages},      {"measured", measured}, {"settings", settings_json(tuning.settings)}};
}

std::unexpected<Error> refuse(const std::string& path, std::string_view why) {
  return std::unexpected(make_error(
      ErrorKind::format,
      fmt::format(
          "{} does not hold settings that trunkline tune saved: {}; run trunkline tune --forget, which "
          "renames it, or set TRUNKLINE_TUNING to another path",
          path, why),
      path));
}

}  // namespace

std::string format_tunings(const std::vector<Tuning>& tunings) {
  OrderedJson list = OrderedJson::array();
  for (const Tuning& each : tunings) list.push_back(tuning_json(each));
  const OrderedJson json = {{"format", kFormat}, {"version", kVersion}, {"tunings", list}};
  // Names of paths and devices need not be UTF-8, which JSON is.
  return json.dump(1, ' ', /*ensure_ascii=*/false, OrderedJson::error_handler_t::replace) + "\n";
}

Result<std::vector<Tuning>> parse_tunings(std::string_view text, const std::string& path) {
  if (text.size() > kMaxFileBytes)
    return refuse(path, fmt::format("it is longer than {} bytes", kMaxFileBytes));
  const auto json = parse_json_object(text, kMaxDepth);
  if (!json) return refuse(path, json.error());
  const auto format = json->find("format");
  if (format == json->end() || *format != kFormat)
    return refuse(path, fmt::format("\"format\" is not \"{}\"", kFormat));
  // Checked before the other fields, which another version may have changed.
  const auto version = json->find("version");
  if (version == json->end() || !version->is_number_unsigned() || *version == 0U)
    return refuse(path, "\"version\" is not a positive integer");
  if (version->get<std::uint64_t>() > kVersion) {
    return std::unexpected(make_error(ErrorKind::unsupported,
                                      fmt::format("{} holds saved settings of format version {}, but this "
                                                  "build reads version {}; upgrade trunkline, or "
                                                  "remove the file with: trunkline tune --forget",
                                                  path, version->get<std::uint64_t>(), kVersion),
                                      path));
  }
  constexpr std::array<std::string_view, 3> kKeys{"format", "version", "tunings"};
  if (auto why = check_keys(*json, kKeys, kKeys.size())) return refuse(path, "it " + *why);
  const Json& list = json->at("tunings");
  if (!list.is_array() || list.size() > kMaxTunings)
    return refuse(path, fmt::format("\"tunings\" is not a list of at most {}", kMaxTunings));
  std::vector<Tuning> tunings;
  for (const Json& each : list) {
    if (auto why = take_tuning(each, tunings.emplace_back()))
      return refuse(path, fmt::format("tuning {} of {}: {}", tunings.size(), list.size(), *why));
  }
  return tunings;
}

}  // namespace trunkline::tuning
