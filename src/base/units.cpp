#include "trunkline/units.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

namespace trunkline {
namespace {

struct Unit {
  std::string_view name;
  std::uint64_t bytes;
};

constexpr std::array<Unit, 9> kUnits{{{"b", 1},
                                      {"kb", 1000},
                                      {"mb", kMB},
                                      {"gb", kGB},
                                      {"tb", 1000 * kGB},
                                      {"kib", kKiB},
                                      {"mib", kMiB},
                                      {"gib", kGiB},
                                      {"tib", 1024 * kGiB}}};

constexpr std::size_t kMaxFractionDigits = 18;  // so that the digits fit 64 bits

// Not <cctype>, which depends on the process's locale.
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_space(char c) { return c == ' ' || c == '\t'; }
char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

std::string_view trim(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

std::string_view take_digits(std::string_view& text) {
  const std::size_t count = std::ranges::find_if_not(text, is_digit) - text.begin();
  const std::string_view digits = text.substr(0, count);
  text.remove_prefix(count);
  return digits;
}

std::optional<std::uint64_t> unit_bytes(std::string_view name) {
  if (name.empty()) return 1;
  for (const Unit& unit : kUnits) {
    if (std::ranges::equal(name, unit.name, {}, lower)) return unit.bytes;
  }
  return std::nullopt;
}

std::optional<std::uint64_t> to_integer(std::string_view digits) {
  std::uint64_t value = 0;
  for (const char c : digits) {
    if (__builtin_mul_overflow(value, std::uint64_t{10}, &value)) return std::nullopt;
    if (__builtin_add_overflow(value, static_cast<std::uint64_t>(c - '0'), &value)) return std::nullopt;
  }
  return value;
}

// Bytes of "0.DIGITS" units if that is a whole number: the reduced denominator must divide the unit.
std::optional<std::uint64_t> fraction_bytes(std::string_view digits, std::uint64_t unit) {
  while (!digits.empty() && digits.back() == '0') digits.remove_suffix(1);
  if (digits.size() > kMaxFractionDigits) return std::nullopt;
  const std::uint64_t numerator = to_integer(digits).value_or(0);
  std::uint64_t denominator = 1;
  for (std::size_t i = 0; i < digits.size(); ++i) denominator *= 10;
  const std::uint64_t common = std::gcd(numerator, denominator);
  denominator /= common;
  if (unit % denominator != 0) return std::nullopt;
  return numerator / common * (unit / denominator);
}

std::unexpected<Error> refuse(std::string_view text, std::string_view why) {
  constexpr std::size_t kShown = 64;
  const bool whole = text.size() <= kShown;
  return std::unexpected(make_error(
      ErrorKind::invalid_argument,
      fmt::format(
          "\"{}{}\" is not a size: {}; write a number of bytes (4096), or a number and a unit, such as "
          "20GB or 64MiB (kB, MB, GB, TB: powers of 1000; KiB, MiB, GiB, TiB: of 1024)",
          text.substr(0, kShown), whole ? "" : "...", why)));
}

// Three significant digits: "1.23", "12.3", "123".
std::string three_digits(double value) {
  return fmt::format("{:.{}f}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

// `value` in the largest decimal unit that keeps it at least 1; the first unit is "kB".
std::string with_decimal_unit(double value) {
  constexpr std::array<std::string_view, 6> kNames{"kB", "MB", "GB", "TB", "PB", "EB"};
  std::size_t unit = 0;
  value /= 1000;
  // 999.5 would be printed as 1000.
  for (; value >= 999.5 && unit + 1 < kNames.size(); ++unit) value /= 1000;
  return fmt::format("{} {}", three_digits(value), kNames[unit]);
}

}  // namespace

Result<std::uint64_t> parse_bytes(std::string_view text) {
  std::string_view rest = trim(text);
  if (rest.empty()) return refuse(text, "it is empty");
  if (rest.front() == '-') return refuse(text, "a size cannot be negative");
  const std::string_view whole_digits = take_digits(rest);
  if (whole_digits.empty()) return refuse(text, "it does not start with a digit");
  std::string_view fraction_digits;
  if (!rest.empty() && rest.front() == '.') {
    rest.remove_prefix(1);
    fraction_digits = take_digits(rest);
    if (fraction_digits.empty()) return refuse(text, "it has no digit after the point");
  }
  const std::optional<std::uint64_t> unit = unit_bytes(trim(rest));
  if (!unit) return refuse(text, fmt::format("\"{}\" is not a unit", trim(rest).substr(0, 16)));

  const std::optional<std::uint64_t> fraction = fraction_bytes(fraction_digits, *unit);
  if (!fraction) return refuse(text, "it is not a whole number of bytes");
  const std::optional<std::uint64_t> whole = to_integer(whole_digits);
  std::uint64_t bytes = 0;
  if (!whole || __builtin_mul_overflow(*whole, *unit, &bytes) ||
      __builtin_add_overflow(bytes, *fraction, &bytes)) {
    return refuse(text, "it does not fit 64 bits");
  }
  return bytes;
}

std::string format_bytes(std::uint64_t bytes) {
  if (bytes != 0 && bytes < kMB && bytes % kKiB == 0) {
    return fmt::format("{:.1f} KiB", static_cast<double>(bytes) / static_cast<double>(kKiB));
  }
  if (bytes < 1000) return fmt::format("{} B", bytes);
  return with_decimal_unit(static_cast<double>(bytes));
}

std::string format_size(std::uint64_t bytes) {
  constexpr std::array<std::pair<std::uint64_t, std::string_view>, 8> kExact{{{1024 * kGiB, "TiB"},
                                                                              {1000 * kGB, "TB"},
                                                                              {kGiB, "GiB"},
                                                                              {kGB, "GB"},
                                                                              {kMiB, "MiB"},
                                                                              {kMB, "MB"},
                                                                              {kKiB, "KiB"},
                                                                              {1000, "kB"}}};
  for (const auto& [unit, name] : kExact) {
    if (bytes != 0 && bytes % unit == 0) return fmt::format("{} {}", bytes / unit, name);
  }
  return format_bytes(bytes);
}

std::string format_rate(double bytes_per_second) {
  if (!std::isfinite(bytes_per_second) || bytes_per_second < 0)
    return fmt::format("{} B/s", bytes_per_second);
  if (bytes_per_second < 999.5) return fmt::format("{} B/s", three_digits(bytes_per_second));
  return with_decimal_unit(bytes_per_second) + "/s";
}

}  // namespace trunkline
