// The descriptor NAME.stripe that accompanies each member of a striped file (docs/formats/stripe.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "trunkline/error.h"

namespace trunkline::volume {

inline constexpr unsigned kMaxMembers = 1024;
inline constexpr std::uint64_t kMinStripeBytes = 4096;  // stripe units are multiples of it
inline constexpr std::uint64_t kMaxStripeBytes = 1ULL << 30;
inline constexpr std::size_t kMaxDescriptorBytes = 4096;

struct Descriptor {
  std::string id;  // 32 lower-case hexadecimal digits, the same in all descriptors of one file
  unsigned member = 0;
  unsigned members = 1;
  std::uint64_t stripe_bytes = 0;
  bool operator==(const Descriptor&) const = default;
};

bool is_stripe_size(std::uint64_t bytes);

std::string random_id();

std::string format_descriptor(const Descriptor& descriptor);

// Accepts what format_descriptor() writes, with any white space and order of keys, and nothing else: `format`
// for everything that is not a descriptor of version 1. `path` is for the message; nothing is read from it.
Result<Descriptor> parse_descriptor(std::string_view text, const std::string& path);

// The descriptor in a file.
Result<Descriptor> read_descriptor(const std::string& path);

// The same, but none for a text that is not a descriptor of any version.
Result<std::optional<Descriptor>> read_descriptor_if_valid(const std::string& path);

}  // namespace trunkline::volume
