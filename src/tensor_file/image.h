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

enum class SumKind {
  crc32,   // of zip
  crc32c,  // of everything else
};

// A checksum of the file's bytes [begin, end).
struct Sum {
  SumKind kind = SumKind::crc32c;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::optional<std::uint32_t> expected = {};  // what reading must find
};

enum class PatchEncoding {
  le32,  // 4 bytes, least significant first
  hex,   // 8 digits of ASCII, lower case
};

// A place in the file where the value of a checksum stands, which is known only once its bytes were seen.
struct Patch {
  std::uint64_t offset = 0;
  std::uint32_t sum = 0;  // index in Image::sums
  PatchEncoding encoding = PatchEncoding::le32;

  std::uint64_t bytes() const { return encoding == PatchEncoding::le32 ? 4 : 8; }
  std::uint64_t end() const { return offset + bytes(); }
};

// Bytes that no extent covers are zero when written, and are skipped (but summed) when read.
struct Image {
  std::string path;
  std::uint64_t bytes = 0;
  std::vector<Extent> extents = {};
  std::vector<Sum> sums = {};
  std::vector<Patch> patches = {};

  // Sorts extents and patches, then checks all: within the file, extents and sums without overlap, sums
  // ascending, patches where no sum is. invalid_argument names the first that is wrong.
  Status arrange();
};

// The elements of a range sorted by place that touch [begin, end).
std::span<const Extent> extents_in(const Image& image, std::uint64_t begin, std::uint64_t end);
std::span<const Patch> patches_in(const Image& image, std::uint64_t begin, std::uint64_t end);

}  // namespace trunkline::tensor_file
