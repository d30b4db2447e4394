// Layouts of random shape over random bytes, and the expected contents of their files.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/sanitizers.h"
#include "support/temp_directory.h"
#include "tensor_file/file_layout.h"
#include "trunkline/buffer.h"
#include "trunkline/checksum.h"
#include "trunkline/engine.h"
#include "trunkline/units.h"

namespace trunkline::tensor_file::test {

using trunkline::test::scaled;

// A layout, its memory, and its file byte by byte, computed without the code under test.
struct Sample {
  FileLayout layout;
  std::vector<Buffer> memory;
  std::vector<std::byte> file;

  Sample() = default;
  Sample(Sample&&) = default;
  Sample& operator=(Sample&&) = default;

  // Memory that begins `misplaced` bytes into a page, filled with random bytes.
  MemoryView make_memory(std::mt19937_64& random, std::uint64_t bytes, std::uint64_t misplaced) {
    auto buffer = Buffer::allocate_pageable(bytes + misplaced);
    EXPECT_TRUE(buffer) << buffer.error().message;
    const MemoryView view(buffer->data() + misplaced, bytes);
    for (std::uint64_t i = 0; i < bytes; i += 61) view.data[i] = static_cast<std::byte>(random());
    memory.push_back(std::move(*buffer));
    return view;
  }

  void add(std::uint64_t offset, MemoryView view) {
    layout.extents.push_back({.offset = offset, .memory = view});
    std::memcpy(file.data() + offset, view.data, view.bytes);
  }

  std::uint32_t checksum_of(const Checksum& checksum) const {
    const auto bytes = std::span(file).subspan(checksum.begin, checksum.end - checksum.begin);
    switch (checksum.kind) {
      case ChecksumKind::crc32:
        return crc32(bytes);
      case ChecksumKind::crc32c:
        return crc32c(bytes);
    }
    return 0;
  }

  void field(const ChecksumField& field) {
    layout.checksum_fields.push_back(field);
    const std::uint32_t value = checksum_of(layout.checksums[field.checksum]);
    std::string text = fmt::format("{:08x}", value);
    if (field.encoding == ChecksumEncoding::le32) {
      text = {static_cast<char>(value), static_cast<char>(value >> 8), static_cast<char>(value >> 16),
              static_cast<char>(value >> 24)};
    }
    std::memcpy(file.data() + field.offset, text.data(), text.size());
  }
};

inline Sample random_sample(std::mt19937_64& random, std::uint64_t bytes, const std::string& path) {
  const auto below = [&](std::uint64_t bound) { return random() % bound; };
  Sample sample;
  sample.layout.path = path;
  sample.layout.bytes = bytes;
  sample.file.resize(bytes);
  for (std::uint64_t at = 0; at < bytes;) {
    if (below(3) == 0) at += below(2) == 0 ? below(5000) : 4096 - at % 4096;
    if (at >= bytes) break;
    const std::uint64_t lengths[] = {1, 10, 5000, kMiB, 3 * kMiB, scaled(9 * kMiB)};
    const std::uint64_t length = std::min(lengths[below(std::size(lengths))], bytes - at);
    sample.add(at, sample.make_memory(random, length, below(2) == 0 ? 0 : below(4096)));
    at += length;
  }
  std::vector<std::uint64_t> gaps;  // room for a field
  for (std::uint64_t at = 0; at < bytes;) {
    const std::uint64_t lengths[] = {1, 1000, kMiB, 5 * kMiB};
    const std::uint64_t end = std::min(bytes, at + lengths[below(std::size(lengths))]);
    sample.layout.checksums.push_back(
        {.kind = below(2) == 0 ? ChecksumKind::crc32 : ChecksumKind::crc32c, .begin = at, .end = end});
    at = end;
    if (below(2) == 0 && at + 20 < bytes) {
      gaps.push_back(at);
      at += 20;
    }
  }
  for (const std::uint64_t gap : gaps) {
    sample.field({.offset = gap + 3,
                  .checksum = static_cast<std::uint32_t>(below(sample.layout.checksums.size())),
                  .encoding = below(2) == 0 ? ChecksumEncoding::le32 : ChecksumEncoding::hex});
  }
  std::ranges::shuffle(sample.layout.extents, random);
  std::ranges::shuffle(sample.layout.checksum_fields, random);
  const Status arranged = sample.layout.arrange();
  EXPECT_TRUE(arranged) << arranged.error().message;
  return sample;
}

inline std::vector<std::byte> contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<std::byte> bytes(file ? static_cast<std::size_t>(file.tellg()) : 0);
  file.seekg(0);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

class FileLayoutTest : public testing::Test {
 protected:
  static Engine make_engine(EngineOptions options = {}) {
    if (!options.lanes) options.lanes = 2;
    if (!options.pinned_budget_bytes) options.pinned_budget_bytes = 256 * kMiB;
    auto engine = Engine::create(options);
    EXPECT_TRUE(engine) << engine.error().message;
    return *engine;
  }

  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(root_.path()))
      found.push_back(entry.path().filename().string());
    std::ranges::sort(found);
    return found;
  }

  trunkline::test::TempDirectory root_;
};

}  // namespace trunkline::tensor_file::test
