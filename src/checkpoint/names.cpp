#include "checkpoint/names.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <random>

#include "checkpoint/manifest.h"

namespace trunkline::checkpoint {
namespace {

constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kManifestPrefix = "manifest-";
constexpr std::string_view kAsidePrefix = "aside-";
constexpr std::string_view kHexDigits = "0123456789abcdef";
constexpr std::size_t kNonceDigits = 16;

std::optional<std::uint64_t> number_behind(std::string_view prefix, std::string_view name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), value);
  if (error != std::errc() || end != name.data() + name.size() || value > kMaxNumber) return std::nullopt;
  return value;
}

// Removes 5 or more digits from the front of `rest`, then `behind`.
std::optional<std::uint64_t> take_index(std::string_view& rest, std::string_view behind) {
  constexpr std::size_t kMinDigits = 5;
  const std::size_t digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
  if (digits < kMinDigits || !rest.substr(digits).starts_with(behind)) return std::nullopt;
  const std::string_view number = rest.substr(0, digits);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (error != std::errc()) return std::nullopt;
  rest.remove_prefix(digits + behind.size());
  return value;
}

bool is_hex(std::string_view text) { return text.find_first_not_of(kHexDigits) == std::string_view::npos; }

}  // namespace

std::string step_directory(std::uint64_t step) { return fmt::format("{}{:08}", kStepPrefix, step); }

std::string manifest_file(std::uint64_t commit) { return fmt::format("{}{:010}", kManifestPrefix, commit); }

std::string shard_file(std::uint64_t index, std::uint64_t count, std::string_view nonce) {
  return fmt::format("shard-{:05}-of-{:05}-{}.safetensors", index, count, nonce);
}

// Another spelling of a number ("step-12") would be a second directory for the same step.
std::optional<std::uint64_t> step_of(std::string_view name) {
  const auto step = number_behind(kStepPrefix, name);
  return step && step_directory(*step) == name ? step : std::nullopt;
}

std::optional<std::uint64_t> commit_of(std::string_view name) {
  const auto commit = number_behind(kManifestPrefix, name);
  return commit && *commit > 0 && manifest_file(*commit) == name ? commit : std::nullopt;
}

std::optional<ShardName> shard_of(std::string_view name) {
  constexpr std::string_view kPrefix = "shard-";
  const std::string_view whole_name = name;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  const auto index = take_index(name, "-of-");
  const auto count = index ? take_index(name, "-") : std::nullopt;
  if (!count || name.size() <= kNonceDigits || name.substr(kNonceDigits) != ".safetensors")
    return std::nullopt;
  const std::string_view nonce = name.substr(0, kNonceDigits);
  if (!is_hex(nonce) || shard_file(*index, *count, nonce) != whole_name) return std::nullopt;
  return ShardName{.index = *index, .count = *count, .nonce = nonce};
}

bool is_shard_file(std::string_view name) { return shard_of(name).has_value(); }

std::string aside_directory(std::string_view time, std::uint64_t number) {
  return number > 1 ? fmt::format("{}{}-{}", kAsidePrefix, time, number)
                    : fmt::format("{}{}", kAsidePrefix, time);
}

bool is_aside_directory(std::string_view name) {
  constexpr std::string_view kTime = "00000000T000000Z";
  if (!name.starts_with(kAsidePrefix)) return false;
  std::string_view rest = name.substr(kAsidePrefix.size());
  if (rest.size() < kTime.size()) return false;
  const std::string_view time = rest.substr(0, kTime.size());
  for (std::size_t i = 0; i < kTime.size(); ++i) {
    if (kTime[i] == '0' ? time[i] < '0' || time[i] > '9' : time[i] != kTime[i]) return false;
  }
  rest.remove_prefix(kTime.size());
  const auto number = rest.empty() ? 1 : number_behind("-", rest);
  return number && aside_directory(time, *number) == name;
}

std::string random_hex(unsigned digits) {
  std::random_device random;
  std::string text(digits, '0');
  for (char& digit : text) digit = kHexDigits[random() % kHexDigits.size()];
  return text;
}

}  // namespace trunkline::checkpoint
