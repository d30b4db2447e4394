// Directories and an engine for tests of volumes.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "support/temp_directory.h"
#include "trunkline/trunkline.h"

namespace trunkline::test {

class VolumeTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kStripe = 8192;

  void SetUp() override {
    auto engine = Engine::create(
        {.lanes = 1, .queue_depth = 8, .block_bytes = 64 * kKiB, .pinned_budget_bytes = 16 * kMiB});
    ASSERT_TRUE(engine) << engine.error().message;
    engine_ = *engine;
  }

  // The first `count` directories d0, d1, ... of this test.
  std::vector<std::string> directories(std::size_t count) const {
    std::vector<std::string> paths;
    for (std::size_t i = 0; i < count; ++i) {
      paths.push_back(root_.file(fmt::format("d{}", i)));
      std::filesystem::create_directory(paths.back());
    }
    return paths;
  }

  static Volume make(const std::vector<std::string>& paths, std::uint64_t stripe_bytes = kStripe) {
    auto volume = Volume::create(paths, {.stripe_bytes = stripe_bytes});
    EXPECT_TRUE(volume) << volume.error().message;
    return *volume;
  }
  Volume make(std::size_t count) const { return make(directories(count)); }

  Result<File> open(const Volume& volume, const std::string& name, Mode mode) const {
    return volume.open(engine_, name, {.mode = mode});
  }

  Status store(const Volume& volume, const std::string& name, std::vector<std::byte> bytes) const {
    auto file = open(volume, name, Mode::write);
    if (!file) return std::unexpected(file.error());
    if (auto put = file->pwrite(std::span(bytes), 0); !put) return std::unexpected(put.error());
    return file->close();
  }

  Result<std::vector<std::byte>> fetch(const Volume& volume, const std::string& name) const {
    auto file = open(volume, name, Mode::read);
    if (!file) return std::unexpected(file.error());
    const auto size = file->size();
    if (!size) return std::unexpected(size.error());
    std::vector<std::byte> bytes(*size);
    if (auto got = file->pread(std::span(bytes), 0); !got) return std::unexpected(got.error());
    return bytes;
  }

  std::string in(std::size_t directory, const std::string& file) const {
    return root_.file(fmt::format("d{}/{}", directory, file));
  }
  bool is_there(std::size_t directory, const std::string& file) const {
    return std::filesystem::exists(in(directory, file));
  }

  // All files of all directories, prefixed with "dK/".
  std::vector<std::string> all_files() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root_.path())) {
      if (!entry.is_directory())
        found.push_back(std::filesystem::relative(entry.path(), root_.path()).string());
    }
    std::ranges::sort(found);
    return found;
  }

  TempDirectory root_;
  Engine engine_;
};

}  // namespace trunkline::test
