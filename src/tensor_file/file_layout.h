// What a file holds or shall hold, in terms of memory: the common description of everything that is saved and
// loaded.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "trunkline/error.h"
#include "trunkline/memory.h"

namespace trunkline::tensor_file {

// Bytes of a file and the memory that they come from or go to.
struct Extent {
  std::uint64_t offset = 0;  // bytes from the file's start
  MemoryView memory;         // never empty; its stream counts for nothing
  bool fresh = false;        // new memory that nobody has touched: reading makes its pages present first
  Fence after = {};          // of the memory's device: what comes before the memory is read or written

  std::uint64_t end() const { return offset + memory.bytes; }
};

enum class ChecksumKind {
  crc32,   // of zip
  crc32c,  // of everything else
};

// A checksum of the file's bytes [begin, end).
struct Checksum {
  ChecksumKind kind = ChecksumKind::crc32c;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::optional<std::uint32_t> expected = {};  // what reading must find
};

enum class ChecksumEncoding {
  le32,  // 4 bytes, least significant first
  hex,   // 8 digits of ASCII, lower case
};

// A place in the file where the value of a checksum stands, which is known only once its bytes were seen.
struct ChecksumField {
  std::uint64_t offset = 0;
  std::uint32_t checksum = 0;  // index in FileLayout::checksums
  ChecksumEncoding encoding = ChecksumEncoding::le32;

  std::uint64_t bytes() const { return encoding == ChecksumEncoding::le32 ? 4 : 8; }
  std::uint64_t end() const { return offset + bytes(); }
};

// Bytes that no extent covers are zero when written, and are skipped (but summed) when read.
struct FileLayout {
  std::string path;
  std::uint64_t bytes = 0;
  std::vector<Extent> extents = {};
  std::vector<Checksum> checksums = {};
  std::vector<ChecksumField> checksum_fields = {};

  // Sorts extents and checksum_fields, then checks all: within the file, extents and checksums without
  // overlap, checksums ascending, checksum_fields where no checksum is. invalid_argument names the first that
  // is wrong.
  Status arrange();
};

// The elements of a range sorted by place that touch [begin, end).
std::span<const Extent> extents_in(const FileLayout& layout, std::uint64_t begin, std::uint64_t end);
std::span<const ChecksumField> checksum_fields_in(const FileLayout& layout, std::uint64_t begin,
                                                  std::uint64_t end);

}  // namespace trunkline::tensor_file
