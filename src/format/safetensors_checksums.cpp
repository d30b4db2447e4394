#include "format/safetensors_checksums.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <span>

#include "trunkline/checksum.h"

namespace trunkline::format {
namespace {

constexpr std::string_view kMarker = "\"trunkline.crc32c\":\"";  // as written in the file
constexpr std::size_t kDigits = 8;                               // of a checksum
constexpr std::size_t kChunkDigits = 13;
constexpr std::size_t kHeadDigits = 9;
constexpr std::size_t kFieldsCharacters = kChunkDigits + 1 + kHeadDigits + 1;
constexpr std::size_t kFixedCharacters = kFieldsCharacters + kDigits + 1;
// The reference implementation pads headers to a multiple of 8, so its headers end in fewer spaces.
constexpr std::string_view kPadding = "        ";

std::uint32_t checksum_of(std::string_view text) {
  return crc32c(std::as_bytes(std::span(text.data(), text.size())));
}

template <class Number>
std::optional<Number> number(std::string_view text, int base) {
  constexpr std::string_view kDigitsOfHex = "0123456789abcdef";
  const auto digits = kDigitsOfHex.substr(0, static_cast<std::size_t>(base));
  if (text.find_first_not_of(digits) != std::string_view::npos) return std::nullopt;
  Number value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

struct Fixed {
  std::uint64_t chunk_bytes = 0;
  std::uint64_t head_bytes = 0;
};

// The first characters of an entry; nullopt if it is not one, or was changed.
std::optional<Fixed> parse_fixed(std::string_view text) {
  if (text.size() < kFixedCharacters) return std::nullopt;
  if (text[kChunkDigits] != ' ' || text[kFieldsCharacters - 1] != ' ' || text[kFixedCharacters - 1] != ' ')
    return std::nullopt;
  const auto chunk = number<std::uint64_t>(text.substr(0, kChunkDigits), 10);
  const auto head = number<std::uint64_t>(text.substr(kChunkDigits + 1, kHeadDigits), 10);
  const auto check = number<std::uint32_t>(text.substr(kFieldsCharacters, kDigits), 16);
  if (!chunk || !head || !check || *check != checksum_of(text.substr(0, kFieldsCharacters)))
    return std::nullopt;
  return Fixed{*chunk, *head};
}

// Whether the entry was made for a header of that size; headers of other programs have less padding.
bool belongs(const std::optional<Fixed>& fixed, std::string_view head) {
  return fixed && fixed->head_bytes == head.size() && head.ends_with(kPadding);
}

std::unexpected<Error> damaged(const std::string& path, std::string_view why) {
  return std::unexpected(make_error(
      ErrorKind::corrupt,
      fmt::format("{} is corrupt: {}; restore it from a copy, or read the remaining data without verifying",
                  path, why),
      path));
}

}  // namespace

Result<std::optional<SafetensorsChecksums>> find_safetensors_checksums(const Metadata& metadata,
                                                                       std::string_view head,
                                                                       std::uint64_t data_bytes,
                                                                       const std::string& path) {
  const auto entry = metadata.find(std::string(kChecksumsKey));
  if (entry == metadata.end()) {
    if (std::ranges::any_of(metadata,
                            [&](const auto& other) { return belongs(parse_fixed(other.second), head); }))
      return damaged(path, "the name of its checksums was changed");
    return std::nullopt;
  }
  const std::string_view text = entry->second;
  const std::string why = fmt::format("\"{}\" in its metadata is damaged", kChecksumsKey);
  const auto fixed = parse_fixed(text);
  if (!fixed || fixed->chunk_bytes == 0) return damaged(path, why);
  const std::string_view digits = text.substr(kFixedCharacters);
  if (digits.find_first_not_of("0123456789abcdef") != std::string_view::npos) return damaged(path, why);
  if (!belongs(fixed, head)) return std::nullopt;
  const std::uint64_t chunks =
      data_bytes / fixed->chunk_bytes + (data_bytes % fixed->chunk_bytes == 0 ? 0 : 1);
  if (digits.size() % kDigits != 0 || digits.size() / kDigits != chunks + 1) return damaged(path, why);

  const std::string stored = std::string(kMarker) + std::string(text);
  std::string blank(head);
  if (const auto at = blank.find(stored); at != std::string::npos)
    blank.replace(at + kMarker.size() + kFixedCharacters, digits.size(), digits.size(), '0');
  if (checksum_of(blank) != number<std::uint32_t>(digits.substr(0, kDigits), 16))
    return damaged(path, "its header does not match its checksum");
  SafetensorsChecksums found{.chunk_bytes = fixed->chunk_bytes, .crc32c = {}};
  found.crc32c.reserve(chunks);
  for (std::size_t at = kDigits; at < digits.size(); at += kDigits)
    found.crc32c.push_back(number<std::uint32_t>(digits.substr(at, kDigits), 16).value_or(0));  // hexadecimal
  return found;
}

}  // namespace trunkline::format
