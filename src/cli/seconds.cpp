#include "cli/seconds.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <system_error>
#include <utility>

namespace trunkline::cli {

Result<double> parse_seconds(std::string_view option, std::string_view text) {
  constexpr std::array<std::pair<std::string_view, double>, 6> kUnits{
      {{"", 1}, {"s", 1}, {"m", 60}, {"min", 60}, {"h", 3600}, {"ms", 1e-3}}};
  double number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  const auto* const found = std::ranges::find(kUnits, unit, &std::pair<std::string_view, double>::first);
  if (code != std::errc() || found == kUnits.end() || !std::isfinite(number) || number < 0) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument,
                   fmt::format("{}: \"{}\" is not a duration; write 90, 60s, 2min or 1h", option, text)));
  }
  return number * found->second;
}

}  // namespace trunkline::cli
