// Describes a file's contents in terms of memory: shared by everything that is saved and loaded.
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

// Bytes of a file, and the memory that they come from or go to.
struct Extent {
  std::uint64_t offset = 0;  // bytes from the file's start
  MemoryView memory;         // never empty; its stream is ignored
  bool fresh = false;        // new, untouched memory: reading makes its pages resident first
  Fence after = {};  // of the memory's device: earlier work that reading or writing the memory must wait for

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
  std::optional<std::uint32_t> expected = {};  // the value that reading must find
};

enum class ChecksumEncoding {
  le32,  // 4 bytes, little-endian
  hex,   // 8 ASCII digits, lower case
};

// A place in the file that holds a checksum's value, which is known only after its bytes were processed.
struct ChecksumField {
  std::uint64_t offset = 0;
  std::uint32_t checksum = 0;  // index in FileLayout::checksums
  ChecksumEncoding encoding = ChecksumEncoding::le32;

  std::uint64_t bytes() const;
  std::uint64_t end() const { return offset + bytes(); }
};

// Bytes that no extent covers are zero when written, and skipped (but included in checksums) when read.
struct FileLayout {
  std::string path;
  std::uint64_t bytes = 0;
  std::vector<Extent> extents = {};
  std::vector<Checksum> checksums = {};
  std::vector<ChecksumField> checksum_fields = {};

  // Sorts extents and checksum_fields, then validates everything: within the file, extents and checksums do
  // not overlap, checksums are ascending, checksum_fields lie outside all checksums. invalid_argument names
  // the first violation.
  Status arrange();
};

// The elements that touch [begin, end), from a range sorted by position.
std::span<const Extent> extents_in(const FileLayout& layout, std::uint64_t begin, std::uint64_t end);
std::span<const ChecksumField> checksum_fields_in(const FileLayout& layout, std::uint64_t begin,
                                                  std::uint64_t end);

}  // namespace trunkline::tensor_file
