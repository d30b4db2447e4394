// JSON as files on disk must have it: what a lenient parser would let pass is an error.
#pragma once

#include <expected>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace trunkline {

// The text as one object, or why it is none: repeated keys (of which a parser silently keeps one), zero bytes
// (the end of the text to the parser, whatever follows) and anything nested `max_depth` deep (1: a flat
// object) are refused.
std::expected<nlohmann::json, std::string> parse_json_object(std::string_view text, int max_depth);

// The same without its value: why the text is no such object; nothing if it is one.
std::optional<std::string> objection_to_json_object(std::string_view text, int max_depth);

// The parts of a value, as their texts; only for texts that the functions above took. Keys are as they stand
// there, without quotes, escapes and all.
std::vector<std::pair<std::string_view, std::string_view>> members_of(std::string_view object);
std::vector<std::string_view> items_of(std::string_view array);

// The value of a member of an object as its text, as it stands there; empty where the object has no such
// member, or writes its key with escapes. Only for texts that parse_json_object() took.
std::string_view member_text(std::string_view object, std::string_view key);

}  // namespace trunkline
