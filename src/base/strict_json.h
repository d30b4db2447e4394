// Strict JSON for files on disk: what a lenient parser would let pass is an error.
#pragma once

#include <expected>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace trunkline {

// Parses the text as one object, or says why it is not one. Rejects repeated keys (of which a parser silently
// keeps one), zero bytes (which end the text for the parser, whatever follows) and anything nested
// `max_depth` deep (1: a flat object).
std::expected<nlohmann::json, std::string> parse_json_object(std::string_view text, int max_depth);

// The same without building the value: why the text is rejected, or nothing if it is valid.
std::optional<std::string> objection_to_json_object(std::string_view text, int max_depth);

// The elements of a value, as text; only for texts that the functions above accepted. Keys are returned
// exactly as written, without quotes, escapes included.
std::vector<std::pair<std::string_view, std::string_view>> members_of(std::string_view object);
std::vector<std::string_view> items_of(std::string_view array);

// The value of an object's member, as text exactly as written; empty where the object has no such member, or
// writes its key with escapes. Only for texts that parse_json_object() accepted.
std::string_view member_text(std::string_view object, std::string_view key);

}  // namespace trunkline
