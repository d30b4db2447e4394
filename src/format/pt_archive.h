// The zip archive of a `.pt` file (PKWARE APPNOTE.TXT 6.3), with the layout of torch.save: uncompressed
// records, each with a local header, its payload and a data descriptor; then the central directory. No I/O.
//
// Unlike torch.save, which aligns all payloads alike, this aligns each by its size: otherwise small ones
// would be mostly padding. So the archive must not have the record ".format_version", from which torch
// concludes that it can compute where payloads are.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace trunkline::format {

// Archive bytes whose contents are known, at `offset` of the file.
struct ArchivePiece {
  std::uint64_t offset = 0;
  std::string bytes;
};

// A payload that is written later, and the two places that hold its CRC-32 (4 bytes, little-endian); a
// payload of 0 bytes has none.
struct ArchivePayload {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t descriptor_crc_at = 0;
  std::uint64_t entry_crc_at = 0;
};

struct ArchiveLayout {
  std::vector<ArchivePiece> pieces;      // ascending; the whole file except the payloads
  std::vector<ArchivePayload> payloads;  // in the order of add_payload()
  std::uint64_t bytes = 0;               // of the file
};

// Payloads begin at multiples of this, like those of torch.save.
inline constexpr std::uint64_t kPayloadAlignment = 64;
// Payloads of at least this size begin at multiples of it: direct I/O moves them without a copy
// (kLeastDirectBytes of block_plan.h).
inline constexpr std::uint64_t kLargePayload = 1ULL << 20;
inline constexpr std::uint64_t kLargePayloadAlignment = 4096;

class ArchiveBuilder {
 public:
  // A record whose contents are known. Names are UTF-8, at most 65535 bytes.
  void add_record(std::string_view name, std::string_view contents);

  // A record whose payload is written later.
  void add_payload(std::string_view name, std::uint64_t bytes);

  // Appends the central directory. The builder cannot be used afterwards.
  ArchiveLayout finish() &&;

 private:
  struct Entry {
    std::string name;
    std::uint64_t header = 0;
    std::uint64_t bytes = 0;
    std::uint32_t crc = 0;
    std::size_t payload = kNone;  // index of a payload whose CRC is not known yet
  };
  static constexpr std::size_t kNone = ~std::size_t{0};

  std::string& here();
  void add_header(std::string_view name, std::uint64_t bytes);
  void add_descriptor(std::uint64_t bytes, std::uint32_t crc);
  void add_entry(const Entry& entry);
  void add_end(std::uint64_t directory);

  ArchiveLayout layout_;
  std::vector<Entry> entries_;
  bool gap_ = true;  // the next byte begins a new piece
};

}  // namespace trunkline::format
