#include "checkpoint/json_record.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <span>

#include "base/invalid_argument.h"
#include "trunkline/checksum.h"

namespace trunkline::checkpoint {

bool is_id(std::string_view text) {
  return text.size() == kIdDigits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Result<std::string> format_json_record(nlohmann::ordered_json record, std::string_view argument) {
  try {
    const std::string text = record.dump(1);
    record["crc32c"] = fmt::format("{:08x}", crc32c(std::as_bytes(std::span(text))));
    return record.dump(1) + "\n";
  } catch (const nlohmann::json::type_error&) {
    return invalid_argument(fmt::format("{}: a path is not valid UTF-8; use another directory", argument));
  }
}

}  // namespace trunkline::checkpoint
