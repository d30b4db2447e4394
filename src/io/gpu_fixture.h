// Engines and files for tests of transfers between files and the memory of GPUs.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <span>
#include <thread>
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

// Fails when anything was asked of the driver that no driver could accept.
class GpuTest : public testing::Test {
 protected:
  GpuTest() {
    gpu();
    fakeCudaReset();
  }
  ~GpuTest() override { EXPECT_STREQ(fakeCudaComplaints(), ""); }

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

  // As many of them are left. An engine whose last handle was dropped by its own lane goes a moment later.
  static void expect_left(const char* what, std::uint64_t count) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (fakeCudaLive(what) != count && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    EXPECT_EQ(fakeCudaLive(what), count) << what;
  }

  TempDirectory directory_;
};

}  // namespace trunkline::test
