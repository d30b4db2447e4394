#include "base/strict_json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

namespace trunkline {

// The sorted json: the ordered one looks for each new key through all.
std::expected<nlohmann::json, std::string> parse_json_object(std::string_view text, int max_depth) {
  using nlohmann::json;
  if (text.find('\0') != std::string_view::npos) return std::unexpected("it contains a zero byte");
  std::string why;
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, json::parse_event_t event, const json& value) {
    using Event = json::parse_event_t;
    if ((event == Event::object_start || event == Event::array_start) && depth >= max_depth) {
      why = "its JSON is nested too deeply";
    } else if (event == Event::object_start) {
      keys.emplace_back();
    } else if (event == Event::object_end && !keys.empty()) {
      keys.pop_back();
    } else if (event == Event::key && !keys.empty() && !keys.back().insert(value.get<std::string>()).second) {
      why = fmt::format("the key \"{}\" stands there twice", value.get<std::string>());
    }
    return why.empty();
  };
  json parsed = json::parse(text.begin(), text.end(), watch, /*allow_exceptions=*/false);
  if (!why.empty()) return std::unexpected(std::move(why));
  if (!parsed.is_object()) return std::unexpected("it is not a JSON object");
  return parsed;
}

}  // namespace trunkline
