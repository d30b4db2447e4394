// What the small records of a directory of checkpoints have in common: JSON with an id, and with a checksum
// of all before it.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "trunkline/error.h"

namespace trunkline::checkpoint {

inline constexpr std::size_t kIdDigits = 16;  // hexadecimal

bool is_id(std::string_view text);

// The text of a record, which ends with the checksum. A path in it that is not valid UTF-8 is the mistake of
// `argument`.
Result<std::string> format_json_record(nlohmann::ordered_json record, std::string_view argument);

}  // namespace trunkline::checkpoint
