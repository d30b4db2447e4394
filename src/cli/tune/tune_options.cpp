#include "cli/tune/tune_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "cli/tune/scratch_files.h"
#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

constexpr double kShortest_s = 5;
constexpr double kLongest_s = 24 * 3600;

std::unexpected<Error> wrong(std::string message) {
  return std::unexpected(make_error(ErrorKind::invalid_argument, std::move(message)));
}

}  // namespace

Result<double> parse_seconds(std::string_view option, std::string_view text) {
  constexpr std::array<std::pair<std::string_view, double>, 6> kUnits{
      {{"", 1}, {"s", 1}, {"m", 60}, {"min", 60}, {"h", 3600}, {"ms", 1e-3}}};
  double number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  const auto* const found = std::ranges::find(kUnits, unit, &std::pair<std::string_view, double>::first);
  if (code != std::errc() || found == kUnits.end() || !std::isfinite(number) || number < 0)
    return wrong(fmt::format("{}: \"{}\" is not a time; write 90, 60s, 2min or 1h", option, text));
  return number * found->second;
}

Status check(const TuneOptions& options) {
  if (options.forget && (!options.export_file.empty() || options.exhaustive_s > 0))
    return wrong("--forget measures nothing; leave out --export and --exhaustive");
  if (options.forget) return {};
  if (options.paths.empty()) return wrong("PATH: name the directory to measure, or those of a volume");
  if (options.merge && options.export_file.empty()) return wrong("--merge: requires --export");
  if (options.budget_s < kShortest_s || options.budget_s > kLongest_s)
    return wrong(fmt::format("--budget: must be from 5 s to 24 h, not {} s", options.budget_s));
  if (options.size_bytes < kFewestScratchBytes)
    return wrong(fmt::format("--size: must be at least {}", format_bytes(kFewestScratchBytes)));
  if (options.exhaustive_s > 0 && !options.export_file.empty())
    return wrong("--exhaustive compares, and chooses nothing to --export");
  return {};
}

}  // namespace trunkline::cli
