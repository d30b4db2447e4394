#include "records/tar_members.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

namespace trunkline::records {
namespace {

constexpr std::uint64_t kBlock = 512;
constexpr std::uint64_t kMaxExtendedBytes = std::uint64_t{1} << 20;
constexpr std::uint64_t kMaxFileBytes = std::numeric_limits<std::int64_t>::max();

struct Field {
  std::size_t offset;
  std::size_t bytes;
};
constexpr Field kName{0, 100};
constexpr Field kSize{124, 12};
constexpr Field kChecksum{148, 8};
constexpr std::size_t kType = 156;
constexpr Field kMagic{257, 6};
constexpr Field kPrefix{345, 155};

std::string_view field(std::string_view block, Field which) {
  return block.substr(which.offset, which.bytes);
}

std::string_view until_nul(std::string_view text) { return text.substr(0, text.find('\0')); }

// Octal digits with spaces or NUL around them; or, where the first bit is set, a number of base 256.
std::optional<std::uint64_t> number_of(std::string_view text) {
  std::uint64_t number = 0;
  if ((static_cast<unsigned char>(text[0]) & 0x80U) != 0) {
    if (static_cast<unsigned char>(text[0]) != 0x80U) return std::nullopt;  // negative, or beyond 64 bits
    for (const char each : text.substr(1)) {
      if (number > kMaxFileBytes >> 8U) return std::nullopt;
      number = number << 8U | static_cast<unsigned char>(each);
    }
    return number;
  }
  const auto first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return 0;
  text = until_nul(text.substr(first));
  if (const auto last = text.find(' '); last != std::string_view::npos) {
    if (text.find_first_not_of(' ', last) != std::string_view::npos) return std::nullopt;
    text = text.substr(0, last);
  }
  for (const char each : text) {
    if (each < '0' || each > '7' || number > kMaxFileBytes >> 3U) return std::nullopt;
    number = number << 3U | static_cast<std::uint64_t>(each - '0');
  }
  return number;
}

// The sum of all bytes, those of the checksum counted as spaces. Some old programs summed signed bytes.
bool has_valid_checksum(std::string_view block) {
  std::int64_t sum = 0;
  std::int64_t signed_sum = 0;
  for (std::size_t index = 0; index < block.size(); ++index) {
    const bool in_checksum = index >= kChecksum.offset && index < kChecksum.offset + kChecksum.bytes;
    const char each = in_checksum ? ' ' : block[index];
    sum += static_cast<unsigned char>(each);
    signed_sum += static_cast<signed char>(each);
  }
  const auto stored = number_of(field(block, kChecksum));
  if (!stored) return false;
  return static_cast<std::int64_t>(*stored) == sum || static_cast<std::int64_t>(*stored) == signed_sum;
}

std::string name_of(std::string_view block) {
  const std::string_view name = until_nul(field(block, kName));
  // GNU's own format has other fields where ustar has the prefix.
  const std::string_view prefix =
      field(block, kMagic) == std::string_view("ustar\0", 6) ? until_nul(field(block, kPrefix)) : "";
  return prefix.empty() ? std::string(name) : fmt::format("{}/{}", prefix, name);
}

bool is_regular(char type, std::string_view name) {
  if (type == '\0') return !name.ends_with('/');  // as before POSIX, folders were not marked otherwise
  return type == '0' || type == '7';
}

bool is_link(char type) { return type == '1' || type == '2'; }

bool is_zero(std::string_view block) {
  return std::ranges::all_of(block, [](char each) { return each == '\0'; });
}

// Links, devices, folders and pipes have no data, whatever their size says.
bool has_data(char type) { return type < '1' || type > '6'; }

std::string_view characters(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// One "LENGTH KEY=VALUE\n" from the front of `text`; nullopt if there is none.
std::optional<std::pair<std::string_view, std::string_view>> take_pax_record(std::string_view& text) {
  std::size_t length = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), length);
  const auto digits = static_cast<std::size_t>(end - text.data());
  if (code != std::errc() || digits + 2 > length || length > text.size()) return std::nullopt;
  const std::string_view record = text.substr(0, length);
  if (record[digits] != ' ' || record.back() != '\n') return std::nullopt;
  const std::string_view pair = record.substr(digits + 1, length - digits - 2);
  const auto equals = pair.find('=');
  if (equals == std::string_view::npos) return std::nullopt;
  text.remove_prefix(length);
  return std::pair(pair.substr(0, equals), pair.substr(equals + 1));
}

}  // namespace

std::optional<SampleName> sample_name(std::string_view name) {
  const std::string_view first = name.substr(0, name.find('/'));
  if (first.size() >= 4 && first.starts_with("__") && first.ends_with("__")) return std::nullopt;
  const auto slash = name.rfind('/');
  const std::size_t base = slash == std::string_view::npos ? 0 : slash + 1;
  const auto dot = name.find('.', base);
  if (dot == std::string_view::npos || dot == base) return std::nullopt;
  return SampleName{.key = name.substr(0, dot), .extension = name.substr(dot + 1)};
}

struct TarMembers::Extended {
  std::optional<std::string> name;
  std::optional<std::uint64_t> bytes;
};

Error TarMembers::error_at(ErrorKind kind, std::string_view why) const {
  return make_error(kind, fmt::format("{}: at byte {}: {}", path_, offset_, why), path_);
}

// Reads the data of a header that describes the member after it. Whether it is such a header.
Result<bool> TarMembers::read_extended(char type, std::uint64_t bytes, Extended& extended) {
  if (type != 'L' && type != 'x' && type != 'X' && type != 'g') return false;
  if (bytes > kMaxExtendedBytes) {
    return std::unexpected(error_at(
        ErrorKind::format,
        fmt::format("an extended header has {} bytes; at most {} are supported", bytes, kMaxExtendedBytes)));
  }
  const auto data = reader_.at(offset_ + kBlock, static_cast<std::size_t>(bytes));
  if (!data) return std::unexpected(data.error());
  std::string_view text = characters(*data);
  if (type == 'L') {
    extended.name = std::string(until_nul(text));
    return true;
  }
  while (!text.empty() && text.front() != '\0') {
    const auto record = take_pax_record(text);
    if (!record) return std::unexpected(error_at(ErrorKind::format, "an extended header (pax) is malformed"));
    const auto& [key, value] = *record;
    if (key.starts_with("GNU.sparse."))
      return std::unexpected(error_at(ErrorKind::unsupported, "sparse files are not supported"));
    if (key != "path" && key != "size") continue;
    if (type == 'g') {
      return std::unexpected(error_at(
          ErrorKind::unsupported, fmt::format("a global header (pax) that sets {} is not supported", key)));
    }
    if (key == "path") {
      extended.name = std::string(value);
      continue;
    }
    std::uint64_t size = 0;
    const auto [end, code] = std::from_chars(value.data(), value.data() + value.size(), size);
    if (code != std::errc() || end != value.data() + value.size() || size > kMaxFileBytes)
      return std::unexpected(error_at(ErrorKind::format, "an extended header (pax) has a malformed size"));
    extended.bytes = size;
  }
  return true;
}

// Passes over the zeros that begin at the current block, if there are any. Whether the file ends with them.
Result<bool> TarMembers::skip_end_marker() {
  const std::uint64_t file_bytes = reader_.size();
  while (offset_ < file_bytes) {
    const auto bytes = static_cast<std::size_t>(std::min(kBlock, file_bytes - offset_));
    if (bytes < kBlock && !has_end_marker_)
      return std::unexpected(error_at(ErrorKind::corrupt, "the file ends within a header of 512 bytes"));
    const auto block = reader_.at(offset_, bytes);
    if (!block) return std::unexpected(block.error());
    if (!is_zero(characters(*block))) {
      if (bytes == kBlock) return false;
      return std::unexpected(bad_header(characters(*block)));
    }
    if (!has_end_marker_) ++archive_;
    has_end_marker_ = true;
    offset_ += bytes;
  }
  return true;
}

Error TarMembers::bad_header(std::string_view block) const {
  if (has_end_marker_) {
    return error_at(
        ErrorKind::corrupt,
        "after the end of the archive there is something that is not another archive: the file is "
        "damaged, or something else was appended to it; make the archive again");
  }
  if (offset_ != 0) return error_at(ErrorKind::corrupt, "a header contradicts its checksum");
  if (block.starts_with("\x1f\x8b")) {
    return error_at(ErrorKind::unsupported,
                    "the archive is compressed by gzip, which random access does not allow; decompress it");
  }
  return error_at(
      ErrorKind::format,
      "not a tar archive, or a damaged one, which must be copied or written again: the first header "
      "contradicts its checksum");
}

Result<std::optional<TarMember>> TarMembers::next() {
  Extended extended;
  std::uint64_t begin = offset_;  // of the headers of the member
  const std::uint64_t file_bytes = reader_.size();
  while (true) {
    const std::uint64_t marker = offset_;
    const auto ended = skip_end_marker();
    if (!ended) return std::unexpected(ended.error());
    if (*ended) break;
    if (offset_ != marker) {  // another archive begins
      extended = {};
      begin = offset_;
    }
    const auto bytes = reader_.at(offset_, kBlock);
    if (!bytes) return std::unexpected(bytes.error());
    const std::string_view block = characters(*bytes);
    if (!has_valid_checksum(block)) return std::unexpected(bad_header(block));
    has_end_marker_ = false;
    const char type = block[kType];
    const auto own_bytes = number_of(field(block, kSize));
    if (!own_bytes) return std::unexpected(error_at(ErrorKind::format, "a header has a malformed size"));
    const std::string own_name = name_of(block);  // reading more invalidates the block
    const bool own_header = type != 'L' && type != 'K' && type != 'x' && type != 'X' && type != 'g';
    const std::uint64_t size = !has_data(type) ? 0
                               : own_header    ? extended.bytes.value_or(*own_bytes)
                                               : *own_bytes;
    if (size > file_bytes - offset_ - kBlock) {
      return std::unexpected(
          error_at(ErrorKind::corrupt,
                   fmt::format("a member of {} bytes is truncated: {} bytes of the file follow its "
                               "header",
                               size, file_bytes - offset_ - kBlock)));
    }
    const std::uint64_t data = offset_ + kBlock;
    const std::uint64_t next_header = data + (size + kBlock - 1) / kBlock * kBlock;
    if (own_header) {
      if (type == 'S')
        return std::unexpected(error_at(ErrorKind::unsupported, "sparse files are not supported"));
      std::string name = std::move(extended.name).value_or(own_name);
      const bool regular = is_regular(type, name);
      TarMember member{.name = std::move(name),
                       .begin = begin,
                       .data = data,
                       .bytes = size,
                       .archive = archive_,
                       .is_link = is_link(type)};
      offset_ = next_header;
      if (regular || member.is_link) return member;
      extended = {};
      begin = offset_;
      continue;
    }
    if (const auto read = read_extended(type, size, extended); !read) return std::unexpected(read.error());
    offset_ = next_header;
  }
  return std::optional<TarMember>();
}

}  // namespace trunkline::records
