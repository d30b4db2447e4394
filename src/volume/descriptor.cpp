#include "volume/descriptor.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "base/strict_json.h"
#include "os/read_text.h"

namespace trunkline::volume {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormat = "trunkline-stripe";
constexpr std::uint64_t kVersion = 1;
constexpr std::size_t kIdDigits = 32;
constexpr std::array<std::string_view, 6> kKeys{"format", "version", "id",
                                                "member", "members", "stripe_bytes"};

std::unexpected<Error> refuse(const std::string& path, std::string_view why) {
  return std::unexpected(make_error(
      ErrorKind::format,
      fmt::format(
          "{} is not the descriptor of a striped file: {}; restore it from a copy, or remove the file and "
          "write it again",
          path, why),
      path));
}

std::optional<std::uint64_t> unsigned_of(const Json& json, std::string_view key) {
  const auto found = json.find(std::string(key));
  if (found == json.end() || !found->is_number_unsigned()) return std::nullopt;
  return found->get<std::uint64_t>();
}

std::optional<std::string> string_of(const Json& json, std::string_view key) {
  const auto found = json.find(std::string(key));
  if (found == json.end() || !found->is_string()) return std::nullopt;
  return found->get<std::string>();
}

// Of version 2 or later: what else it says is unknown.
bool is_newer(std::string_view text) {
  const auto json = parse_json_object(text.substr(0, kMaxDescriptorBytes), 1);
  return json && string_of(*json, "format") == kFormat &&
         unsigned_of(*json, "version").value_or(0) > kVersion;
}

bool is_id(std::string_view text) {
  return text.size() == kIdDigits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

bool is_stripe_size(std::uint64_t bytes) {
  return bytes >= kMinStripeBytes && bytes <= kMaxStripeBytes && bytes % kMinStripeBytes == 0;
}

std::string random_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

std::string format_descriptor(const Descriptor& descriptor) {
  const nlohmann::ordered_json json = {{"format", kFormat},
                                       {"version", kVersion},
                                       {"id", descriptor.id},
                                       {"member", descriptor.member},
                                       {"members", descriptor.members},
                                       {"stripe_bytes", descriptor.stripe_bytes}};
  return json.dump(1) + "\n";
}

Result<Descriptor> parse_descriptor(std::string_view text, const std::string& path) {
  if (text.size() > kMaxDescriptorBytes)
    return refuse(path, fmt::format("it is longer than {} bytes", kMaxDescriptorBytes));
  const auto json = parse_json_object(text, 1);
  if (!json) return refuse(path, "it is not a flat JSON object");
  if (string_of(*json, "format") != kFormat)
    return refuse(path, fmt::format("\"format\" is not \"{}\"", kFormat));
  // Checked before the other fields, which another version may have changed.
  const auto version = unsigned_of(*json, "version");
  if (!version || *version == 0) return refuse(path, "\"version\" is not a positive integer");
  if (*version > kVersion) {
    return std::unexpected(make_error(
        ErrorKind::format,
        fmt::format(
            "{} is a stripe descriptor of version {}, but this build reads version {}; upgrade trunkline to "
            "open the file",
            path, *version, kVersion),
        path));
  }
  for (const auto& item : json->items()) {
    if (std::ranges::find(kKeys, item.key()) == kKeys.end())
      return refuse(path, fmt::format("version {} has no key \"{}\"", *version, item.key()));
  }
  const auto id = string_of(*json, "id");
  if (!id || !is_id(*id)) return refuse(path, "\"id\" is not 32 lower-case hexadecimal digits");
  const auto members = unsigned_of(*json, "members");
  if (!members || *members == 0 || *members > kMaxMembers)
    return refuse(path, fmt::format("\"members\" is not an integer in 1 .. {}", kMaxMembers));
  const auto member = unsigned_of(*json, "member");
  if (!member || *member >= *members) return refuse(path, "\"member\" is not an integer below \"members\"");
  const auto stripe_bytes = unsigned_of(*json, "stripe_bytes");
  if (!stripe_bytes || !is_stripe_size(*stripe_bytes)) {
    return refuse(path, fmt::format("\"stripe_bytes\" is not a multiple of {}, at most {}", kMinStripeBytes,
                                    kMaxStripeBytes));
  }
  return Descriptor{*id, static_cast<unsigned>(*member), static_cast<unsigned>(*members), *stripe_bytes};
}

Result<Descriptor> read_descriptor(const std::string& path) {
  auto text = os::read_text(path, kMaxDescriptorBytes + 1);
  if (!text) return std::unexpected(text.error());
  return parse_descriptor(*text, path);
}

Result<std::optional<Descriptor>> read_descriptor_if_valid(const std::string& path) {
  const auto text = os::read_text(path, kMaxDescriptorBytes + 1);
  if (!text) return std::unexpected(text.error());
  auto descriptor = parse_descriptor(*text, path);
  if (descriptor) return *std::move(descriptor);
  if (is_newer(*text)) return std::unexpected(std::move(descriptor.error()));
  return std::nullopt;
}

}  // namespace trunkline::volume
