// Options whose value is a whole number.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <string>
#include <system_error>

namespace trunkline::cli {

// Empty for a whole number from `least` to `most`, else what is wrong. Parsing as an unsigned number alone
// would accept "-1" as a large one.
inline std::string objection_to_number(const std::string& text, std::uint64_t least, std::uint64_t most,
                                       const std::string& most_shown) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && number >= least && number <= most)
    return "";
  return fmt::format("must be a whole number from {} to {}, not \"{}\"", least, most_shown, text);
}

// The check of such an option; it adds nothing to the help.
inline CLI::Validator whole_number(std::uint64_t least, std::uint64_t most) {
  return {[least, most](const std::string& text) {
            return objection_to_number(text, least, most, std::to_string(most));
          },
          ""};
}

}  // namespace trunkline::cli
