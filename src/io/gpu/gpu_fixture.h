// Engines and files for tests of transfers between files and GPU memory.
#pragma once

#include <gtest/gtest.h>

#include <span>
#include <vector>

#include "support/gpu.h"
#include "support/temp_directory.h"
#include "support/test_memory.h"
#include "trunkline/trunkline.h"

namespace trunkline::test {

inline std::vector<std::byte> random_bytes(std::size_t bytes, std::uint64_t seed) {
  std::vector<std::byte> made(bytes);
  fill_random(made, seed);
  return made;
}

class GpuTest : public testing::Test {
 protected:
  static Engine engine(EngineOptions options = {}) {
    options.lanes = options.lanes.value_or(2);
    auto made = Engine::create(options);
    EXPECT_TRUE(made) << made.error().message;
    return *made;
  }

  File file(const Engine& engine, std::span<const std::byte> contents, OpenOptions options = {}) {
    options.mode = Mode::write;
    auto opened = File::open(engine, directory_.file("file"), options);
    EXPECT_TRUE(opened) << opened.error().message;
    std::vector<std::byte> copy(contents.begin(), contents.end());
    if (!copy.empty()) {
      EXPECT_TRUE(opened->pwrite({copy.data(), copy.size()}, 0));
    }
    return *opened;
  }

  static std::vector<std::byte> contents(const File& file) {
    std::vector<std::byte> bytes(*file.size());
    if (!bytes.empty()) {
      EXPECT_TRUE(file.pread({bytes.data(), bytes.size()}, 0));
    }
    return bytes;
  }

  GpuWatch watch_;
  TempDirectory directory_;
};

}  // namespace trunkline::test
