#include "format/pt_archive.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "trunkline/checksum.h"

namespace trunkline::format {
namespace {

constexpr std::uint64_t kFull16 = std::numeric_limits<std::uint16_t>::max();
constexpr std::uint64_t kFull32 = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint16_t kVersion = 20;  // 2.0, and 4.5 for sizes in zip64 form
constexpr std::uint16_t kVersion64 = 45;
constexpr std::uint16_t kUtf8 = 1U << 11;
constexpr std::uint16_t kHasDescriptor = 1U << 3;
constexpr std::uint16_t kStored = 0;
constexpr std::uint16_t kTime = 0;
constexpr std::uint16_t kDate = 0x21;  // 1980-01-01: the same state always gives the same file
constexpr std::uint16_t kZip64Extra = 1;
constexpr std::uint16_t kPaddingExtra = 0x4246;  // "FB", like the padding of torch.save
constexpr std::uint64_t kExtraHead = 4;
constexpr std::uint64_t kLocalHeader = 30;
constexpr std::uint64_t kCrcInEntry = 16;
constexpr std::uint64_t kCrcInDescriptor = 4;

template <class T>
void put(std::string& to, T value) {
  for (unsigned shift = 0; shift < 8 * sizeof(T); shift += 8)
    to.push_back(static_cast<char>(value >> shift & 0xFF));
}
void put16(std::string& to, std::uint64_t value) { put(to, static_cast<std::uint16_t>(value)); }
void put32(std::string& to, std::uint64_t value) { put(to, static_cast<std::uint32_t>(value)); }
void put64(std::string& to, std::uint64_t value) { put(to, value); }

// Needs the zip64 form, since the 32-bit field cannot hold it.
bool is_wide(std::uint64_t value) { return value >= kFull32; }

std::uint16_t flags_of(std::uint64_t bytes) { return bytes == 0 ? kUtf8 : kUtf8 | kHasDescriptor; }

}  // namespace

// The piece that ends where the file ends so far.
std::string& ArchiveBuilder::here() {
  if (std::exchange(gap_, false)) layout_.pieces.push_back({.offset = layout_.bytes, .bytes = {}});
  return layout_.pieces.back().bytes;
}

// CRC and sizes follow in the descriptor. Sizes that need the zip64 form are also in the header: only the
// extra field shows that the descriptor has that form.
void ArchiveBuilder::add_header(std::string_view name, std::uint64_t bytes) {
  const std::uint64_t alignment = bytes >= kLargePayload ? kLargePayloadAlignment : kPayloadAlignment;
  const bool wide = is_wide(bytes);
  const std::uint64_t wide_bytes = wide ? kExtraHead + 16 : 0;
  const std::uint64_t fixed = kLocalHeader + name.size() + wide_bytes + kExtraHead;
  const std::uint64_t payload = (layout_.bytes + fixed + alignment - 1) / alignment * alignment;
  const std::uint64_t padding = payload - layout_.bytes - fixed;
  std::string& to = here();
  to += "PK\3\4";
  put16(to, wide ? kVersion64 : kVersion);
  put16(to, flags_of(bytes));
  put16(to, kStored);
  put16(to, kTime);
  put16(to, kDate);
  put32(to, 0);
  put32(to, wide ? kFull32 : 0);
  put32(to, wide ? kFull32 : 0);
  put16(to, name.size());
  put16(to, wide_bytes + kExtraHead + padding);
  to += name;
  if (wide) {
    put16(to, kZip64Extra);
    put16(to, 16);
    put64(to, bytes);
    put64(to, bytes);
  }
  put16(to, kPaddingExtra);
  put16(to, padding);
  to.append(padding, 'Z');
  layout_.bytes = payload;
}

void ArchiveBuilder::add_descriptor(std::uint64_t bytes, std::uint32_t crc) {
  if (bytes == 0) return;
  std::string& to = here();
  const std::size_t before = to.size();
  to += "PK\7\10";
  put32(to, crc);
  for (int sizes = 0; sizes < 2; ++sizes) {
    if (is_wide(bytes)) {
      put64(to, bytes);
    } else {
      put32(to, bytes);
    }
  }
  layout_.bytes += to.size() - before;
}

void ArchiveBuilder::add_record(std::string_view name, std::string_view contents) {
  const std::uint32_t crc = crc32(std::as_bytes(std::span(contents)));
  entries_.push_back(
      {.name = std::string(name), .header = layout_.bytes, .bytes = contents.size(), .crc = crc});
  add_header(name, contents.size());
  here() += contents;
  layout_.bytes += contents.size();
  add_descriptor(contents.size(), crc);
}

void ArchiveBuilder::add_payload(std::string_view name, std::uint64_t bytes) {
  if (bytes == 0) {
    add_record(name, {});
    layout_.payloads.push_back({.offset = layout_.bytes});
    return;
  }
  entries_.push_back({.name = std::string(name),
                      .header = layout_.bytes,
                      .bytes = bytes,
                      .payload = layout_.payloads.size()});
  add_header(name, bytes);
  layout_.payloads.push_back({.offset = layout_.bytes,
                              .bytes = bytes,
                              .descriptor_crc_at = layout_.bytes + bytes + kCrcInDescriptor});
  layout_.bytes += bytes;
  gap_ = true;
  add_descriptor(bytes, 0);
}

void ArchiveBuilder::add_entry(const Entry& entry) {
  std::string& to = here();
  const std::size_t before = to.size();
  if (entry.payload != kNone) layout_.payloads[entry.payload].entry_crc_at = layout_.bytes + kCrcInEntry;
  const bool wide = is_wide(entry.bytes);
  const bool far = is_wide(entry.header);
  const std::uint64_t extra = (wide ? 16 : 0) + (far ? 8 : 0);
  to += "PK\1\2";
  put16(to, wide || far ? kVersion64 : kVersion);
  put16(to, wide || far ? kVersion64 : kVersion);
  put16(to, flags_of(entry.bytes));
  put16(to, kStored);
  put16(to, kTime);
  put16(to, kDate);
  put32(to, entry.crc);
  put32(to, std::min(entry.bytes, kFull32));
  put32(to, std::min(entry.bytes, kFull32));
  put16(to, entry.name.size());
  put16(to, extra == 0 ? 0 : kExtraHead + extra);
  put16(to, 0);  // comment
  put16(to, 0);  // disk
  put16(to, 0);  // internal attributes
  put32(to, 0);  // external attributes
  put32(to, std::min(entry.header, kFull32));
  to += entry.name;
  if (extra != 0) {
    put16(to, kZip64Extra);
    put16(to, extra);
    if (wide) {
      put64(to, entry.bytes);
      put64(to, entry.bytes);
    }
    if (far) put64(to, entry.header);
  }
  layout_.bytes += to.size() - before;
}

void ArchiveBuilder::add_end(std::uint64_t directory) {
  const std::uint64_t end = layout_.bytes;
  const std::uint64_t count = entries_.size();
  std::string& to = here();
  const std::size_t before = to.size();
  to += "PK\6\6";
  put64(to, 44);  // of the rest of this record
  put16(to, kVersion64);
  put16(to, kVersion64);
  put32(to, 0);
  put32(to, 0);
  put64(to, count);
  put64(to, count);
  put64(to, end - directory);
  put64(to, directory);
  to += "PK\6\7";
  put32(to, 0);
  put64(to, end);
  put32(to, 1);
  to += "PK\5\6";
  put16(to, 0);
  put16(to, 0);
  put16(to, std::min(count, kFull16));
  put16(to, std::min(count, kFull16));
  put32(to, std::min(end - directory, kFull32));
  put32(to, std::min(directory, kFull32));
  put16(to, 0);
  layout_.bytes += to.size() - before;
}

ArchiveLayout ArchiveBuilder::finish() && {
  const std::uint64_t directory = layout_.bytes;
  here().reserve(here().size() + entries_.size() * 80);
  for (const Entry& entry : entries_) add_entry(entry);
  add_end(directory);
  return std::move(layout_);
}

}  // namespace trunkline::format
