// Units with known bytes, stored in files of an engine.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/temp_directory.h"
#include "trunkline/checksum.h"
#include "trunkline/stream.h"
#include "trunkline/units.h"

namespace trunkline::test {

struct StoredUnits {
  std::vector<std::string> paths;
  std::vector<StreamUnit> units;
  std::vector<std::vector<std::byte>> contents;  // of each unit's memory; zero where no part is
};

inline std::vector<std::byte> random_bytes(std::mt19937_64& random, std::size_t bytes) {
  std::vector<std::byte> made(bytes + 8);
  for (std::size_t at = 0; at < bytes; at += 8) {
    const std::uint64_t value = random();
    std::memcpy(made.data() + at, &value, 8);
  }
  made.resize(bytes);
  return made;
}

class StreamTest : public testing::Test {
 protected:
  static Engine make_engine(const EngineOptions& options = {}) {
    auto engine = Engine::create(options);
    EXPECT_TRUE(engine) << engine.error().message;
    return std::move(*engine);
  }

  void write(const Engine& engine, const std::string& path, std::vector<std::byte>& bytes) {
    auto file = File::open(engine, path, {.mode = Mode::write});
    ASSERT_TRUE(file) << file.error().message;
    ASSERT_TRUE(file->pwrite({bytes.data(), bytes.size()}, 0));
    ASSERT_TRUE(file->close());
  }

  // One file, with a page-aligned part for each unit.
  StoredUnits store_plain(const Engine& engine, const std::vector<std::uint64_t>& unit_bytes) {
    StoredUnits stored{.paths = {root_.file("pack")}, .units = {}, .contents = {}};
    std::vector<std::byte> file;
    for (const std::uint64_t bytes : unit_bytes) {
      std::vector<std::byte> content = random_bytes(random_, bytes);
      stored.units.push_back(
          {.name = fmt::format("unit {}", stored.units.size()),
           .bytes = bytes,
           .parts = {
               {.file = 0, .offset = file.size(), .bytes = bytes, .at = 0, .checksum = crc32c(content)}}});
      file.insert(file.end(), content.begin(), content.end());
      file.resize((file.size() + 4095) / 4096 * 4096);
      stored.contents.push_back(std::move(content));
    }
    write(engine, stored.paths[0], file);
    return stored;
  }

  // Several files, with several parts per unit, at arbitrary offsets in both.
  StoredUnits store_scattered(const Engine& engine, std::size_t units) {
    StoredUnits stored;
    std::vector<std::vector<std::byte>> files(1 + random_() % 3);
    for (std::size_t unit = 0; unit < units; ++unit) {
      StreamUnit made{.name = fmt::format("unit {}", unit), .bytes = 0, .parts = {}};
      std::vector<std::byte> content;
      for (std::size_t part = random_() % 4; part < 4; ++part) {
        const std::size_t file = random_() % files.size();
        files[file].resize(files[file].size() + (random_() % 2 == 0 ? 0 : random_() % 5000));
        content.resize(content.size() + (random_() % 2 == 0 ? 0 : random_() % 5000));
        const auto bytes = random_bytes(random_, random_() % 100'000);
        made.parts.push_back({.file = file,
                              .offset = files[file].size(),
                              .bytes = bytes.size(),
                              .at = content.size(),
                              .checksum = crc32c(bytes)});
        files[file].insert(files[file].end(), bytes.begin(), bytes.end());
        content.insert(content.end(), bytes.begin(), bytes.end());
      }
      if (content.empty()) content.resize(1);
      made.bytes = content.size();
      stored.units.push_back(std::move(made));
      stored.contents.push_back(std::move(content));
    }
    for (std::size_t file = 0; file < files.size(); ++file) {
      stored.paths.push_back(root_.file(fmt::format("shard{}", file)));
      if (files[file].empty()) files[file].resize(1);
      write(engine, stored.paths.back(), files[file]);
    }
    return stored;
  }

  static Result<WeightStream> open(const Engine& engine, const StoredUnits& stored,
                                   const StreamOptions& options) {
    std::vector<File> files;
    for (const std::string& path : stored.paths) {
      auto file = File::open(engine, path);
      EXPECT_TRUE(file) << file.error().message;
      files.push_back(*file);
    }
    return WeightStream::open(engine, std::move(files), stored.units, options);
  }

  // Compares the parts; bytes between them are unspecified.
  static bool holds(const StoredUnits& stored, std::size_t unit, const MemoryView& memory) {
    if (memory.bytes != stored.units[unit].bytes) return false;
    for (const StreamPart& part : stored.units[unit].parts) {
      if (part.bytes > 0 &&
          std::memcmp(memory.data + part.at, stored.contents[unit].data() + part.at, part.bytes) != 0)
        return false;
    }
    return true;
  }

  TempDirectory root_;
  std::mt19937_64 random_{11};
};

}  // namespace trunkline::test
