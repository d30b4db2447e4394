// Striped files that grow and shrink: the members' sizes always match, and no data is cut off.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "support/test_memory.h"
#include "volume/volume_fixture.h"

namespace trunkline {
namespace {

using test::VolumeTest;

constexpr std::uint64_t kPart = 10'000;

// Each writer has its own File, as separate processes would.
TEST_F(VolumeTest, ConcurrentGrowthTruncatesNothing) {
  constexpr int kWriters = 3;
  constexpr int kParts = 400;
  const Volume volume = make(2);
  ASSERT_TRUE(store(volume, "f", {}));
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&, writer] {
      auto file = open(volume, "f", Mode::read_write);
      ASSERT_TRUE(file) << file.error().message;
      std::vector<std::byte> part(kPart, static_cast<std::byte>(writer + 1));
      for (int index = writer; index < kParts; index += kWriters)
        ASSERT_TRUE(file->pwrite(std::span(part), static_cast<std::uint64_t>(index) * kPart));
    });
  }
  for (std::thread& writer : writers) writer.join();
  const auto bytes = fetch(volume, "f");
  ASSERT_TRUE(bytes) << bytes.error().message;
  ASSERT_EQ(bytes->size(), kPart * kParts);
  for (std::size_t at = 0; at < bytes->size(); ++at)
    ASSERT_EQ((*bytes)[at], static_cast<std::byte>(at / kPart % kWriters + 1)) << at;
}

TEST_F(VolumeTest, AFileCanBeOpenedWhileAnotherGrowsIt) {
  const Volume volume = make(3);
  ASSERT_TRUE(store(volume, "f", {}));
  std::thread writer([&] {
    auto file = open(volume, "f", Mode::read_write);
    ASSERT_TRUE(file) << file.error().message;
    std::vector<std::byte> part(100'000);
    for (std::uint64_t index = 0; index < 300; ++index)
      ASSERT_TRUE(file->pwrite(std::span(part), index * part.size()));
  });
  for (int round = 0; round < 300; ++round) {
    const auto file = open(volume, "f", Mode::read);
    EXPECT_TRUE(file) << file.error().message;
  }
  writer.join();
}

TEST_F(VolumeTest, TruncatingWaitsForEarlierWrites) {
  const Volume volume = make(2);
  const auto slow = Engine::create({.lanes = 1, .queue_depth = 1, .block_bytes = 4096});
  ASSERT_TRUE(slow) << slow.error().message;
  std::vector<std::byte> data(4'000'000, std::byte{7});
  for (int round = 0; round < 5; ++round) {
    auto file = volume.open(*slow, "f", {.mode = Mode::write});
    ASSERT_TRUE(file) << file.error().message;
    const Future writing = file->async_pwrite(std::span(data), 0);
    ASSERT_TRUE(file->truncate(kPart));
    EXPECT_TRUE(writing.result());
    ASSERT_TRUE(file->close());
    const auto bytes = fetch(volume, "f");
    ASSERT_TRUE(bytes) << bytes.error().message;
    EXPECT_EQ(*bytes, std::vector<std::byte>(kPart, std::byte{7}));
  }
}

}  // namespace
}  // namespace trunkline
