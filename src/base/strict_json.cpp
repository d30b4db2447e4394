#include "base/strict_json.h"

#include <fmt/format.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

namespace trunkline {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kSpace = " \t\n\r";

// The end of the string that begins at `at`.
std::size_t end_of_string(std::string_view json, std::size_t at) {
  for (++at; at < json.size() && json[at] != '"'; ++at) {
    if (json[at] == '\\') ++at;
  }
  return at + 1;
}

// The end of the value that begins at `at`: the position of the comma or bracket that follows it.
std::size_t end_of_value(std::string_view json, std::size_t at) {
  int depth = 0;
  while (at < json.size()) {
    const char c = json[at];
    if (depth == 0 && (c == ',' || c == '}' || c == ']')) break;
    if (c == '"') {
      at = end_of_string(json, at);
      continue;
    }
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    ++at;
  }
  return at;
}

std::string_view without_space_behind(std::string_view text) {
  return text.substr(0, text.find_last_not_of(kSpace) + 1);
}

// Checks the text before it is parsed into a value. (The parser's own callback would take time quadratic in
// the number of members: after each member it scans all earlier ones for one that the callback discarded.)
class Inspector : public nlohmann::json_sax<Json> {
 public:
  explicit Inspector(int max_depth) : max_depth_(max_depth) {}
  const std::string& why() const { return why_; }

  bool null() override { return true; }
  bool boolean(bool /*value*/) override { return true; }
  bool number_integer(number_integer_t /*value*/) override { return true; }
  bool number_unsigned(number_unsigned_t /*value*/) override { return true; }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override { return true; }
  bool string(string_t& /*value*/) override { return true; }
  bool binary(binary_t& /*value*/) override { return true; }
  bool start_object(std::size_t /*members*/) override {
    keys_.emplace_back();
    return descend();
  }
  bool key(string_t& name) override {
    const auto [place, inserted] = keys_.back().insert(std::move(name));
    if (!inserted) why_ = fmt::format("the key \"{}\" is duplicated", *place);
    return inserted;
  }
  bool end_object() override {
    keys_.pop_back();
    --depth_;
    return true;
  }
  bool start_array(std::size_t /*items*/) override { return descend(); }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool parse_error(std::size_t /*position*/, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    why_ = "it is not a JSON object";
    return false;
  }

 private:
  bool descend() {
    if (++depth_ <= max_depth_) return true;
    why_ = "its JSON is nested too deeply";
    return false;
  }

  const int max_depth_;
  int depth_ = 0;
  std::vector<std::set<string_t>> keys_;  // of the objects that are still open
  std::string why_;
};

}  // namespace

std::optional<std::string> objection_to_json_object(std::string_view text, int max_depth) {
  if (text.find('\0') != std::string_view::npos) return "it contains a zero byte";
  Inspector inspector(max_depth);
  if (!Json::sax_parse(text.begin(), text.end(), &inspector)) return inspector.why();
  const std::size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos || text[first] != '{') return "it is not a JSON object";
  return std::nullopt;
}

std::vector<std::pair<std::string_view, std::string_view>> members_of(std::string_view object) {
  std::vector<std::pair<std::string_view, std::string_view>> members;
  std::size_t at = object.find('{') + 1;
  while (true) {
    const std::size_t begin = object.find_first_of("\"}", at);
    if (begin >= object.size() || object[begin] == '}') return members;
    const std::size_t end = end_of_string(object, begin);
    const std::size_t value = object.find_first_not_of(kSpace, object.find(':', end) + 1);
    at = end_of_value(object, value);
    members.emplace_back(object.substr(begin + 1, end - begin - 2),
                         without_space_behind(object.substr(value, at - value)));
  }
}

std::vector<std::string_view> items_of(std::string_view array) {
  std::vector<std::string_view> items;
  std::size_t at = array.find('[') + 1;
  while (true) {
    at = array.find_first_not_of(kSpace, at);
    if (at >= array.size() || array[at] == ']') return items;
    const std::size_t end = end_of_value(array, at);
    items.push_back(without_space_behind(array.substr(at, end - at)));
    at = end < array.size() && array[end] == ',' ? end + 1 : end;
  }
}

// The sorted json type: the ordered one scans all keys for each new one.
std::expected<Json, std::string> parse_json_object(std::string_view text, int max_depth) {
  if (auto why = objection_to_json_object(text, max_depth)) return std::unexpected(std::move(*why));
  Json parsed = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return std::unexpected("it is not a JSON object");
  return parsed;
}

std::string_view member_text(std::string_view object, std::string_view key) {
  std::size_t at = object.find('{');
  while (at < object.size() && object[at] != '}') {
    const std::size_t begin = object.find('"', at);
    if (begin == std::string_view::npos) break;
    const std::size_t end = end_of_string(object, begin);
    const std::size_t colon = object.find(':', end);
    const std::size_t value = object.find_first_not_of(kSpace, colon + 1);
    if (colon == std::string_view::npos || value == std::string_view::npos) break;
    at = end_of_value(object, value);
    const std::string_view written = object.substr(begin + 1, end - begin - 2);
    // A key with an escape differs from its spelling: the key "a\n" ends with a line feed.
    if (written != key || written.contains('\\')) continue;
    const std::string_view found = object.substr(value, at - value);
    return found.substr(0, found.find_last_not_of(kSpace) + 1);
  }
  return {};
}

}  // namespace trunkline
