#include "tensor_file/file_reader.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "io/file/file_core.h"
#include "support/sanitizers.h"
#include "tensor_file/file_layout_fixture.h"

namespace trunkline::tensor_file {
namespace {

using test::random_sample;
using test::Sample;

class FileReaderTest : public test::FileLayoutTest {
 protected:
  // Writes a file with the sample's bytes.
  void store(const Sample& sample) const {
    std::ofstream file(sample.layout.path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(sample.file.data()),
               static_cast<std::streamsize>(sample.file.size()));
  }

  // The same layout, with memory to read into; some extents are left out.
  static Sample targets_of(const Sample& sample, std::mt19937_64& random, bool all) {
    Sample targets;
    targets.layout.path = sample.layout.path;
    targets.layout.bytes = sample.layout.bytes;
    targets.layout.checksums = sample.layout.checksums;
    for (Checksum& checksum : targets.layout.checksums) checksum.expected = sample.checksum_of(checksum);
    for (const Extent& extent : sample.layout.extents) {
      if (!all && random() % 3 == 0) continue;
      const MemoryView view =
          targets.make_memory(random, extent.memory.bytes, random() % 2 == 0 ? 0 : random() % 4096);
      targets.layout.extents.push_back({.offset = extent.offset, .memory = view});
    }
    return targets;
  }

  static std::vector<FileReader::Target> open(const Engine& engine,
                                              const std::vector<const Sample*>& samples) {
    std::vector<FileReader::Target> opened;
    for (const Sample* sample : samples) {
      auto file = File::open(engine, sample->layout.path);
      EXPECT_TRUE(file);
      opened.push_back({.file = *file, .layout = sample->layout});
    }
    return opened;
  }

  static void expect_filled(const Sample& targets, const Sample& sample) {
    for (const Extent& extent : targets.layout.extents) {
      ASSERT_EQ(std::memcmp(extent.memory.data, sample.file.data() + extent.offset, extent.memory.bytes), 0);
    }
  }

  std::mt19937_64 random_{5};
};

TEST_F(FileReaderTest, FillsAllMemory) {
  const Engine engine = make_engine();
  for (int round = 0; round < test::scaled(40); ++round) {
    std::vector<Sample> samples;
    std::vector<Sample> targets;
    for (int file = 0; file < 1 + round % 3; ++file) {
      samples.push_back(random_sample(random_, random_() % (test::scaled(24 * kMiB)),
                                      root_.file(fmt::format("f{}", file))));
      store(samples.back());
      targets.push_back(targets_of(samples.back(), random_, round % 2 == 0));
    }
    std::vector<const Sample*> all;
    for (const Sample& each : targets) all.push_back(&each);
    FileReader reader(engine, open(engine, all),
                      {.verify = round % 4 != 0,
                       .workers = 1 + static_cast<unsigned>(round) % 3,
                       .staging_bytes = (random_() % 5) * 4 * kMiB});
    const Status status = reader.read();
    ASSERT_TRUE(status) << status.error().message;
    for (std::size_t i = 0; i < samples.size(); ++i) expect_filled(targets[i], samples[i]);
  }
}

// Blocks that are read into the new memory itself, and blocks that are copied into it.
TEST_F(FileReaderTest, FillsNewMemory) {
  const Engine engine = make_engine();
  Sample sample;
  sample.layout = {.path = root_.file("f"), .bytes = test::scaled(30 * kMiB)};
  sample.file.resize(sample.layout.bytes);
  for (std::byte& byte : sample.file) byte = static_cast<std::byte>(random_());
  store(sample);
  for (const std::uint64_t head : {0UL, 4096UL, 520UL}) {
    for (const unsigned workers : {1U, 2U, 4U}) {
      Sample targets;
      targets.layout = sample.layout;
      for (std::uint64_t at = head; at < sample.layout.bytes;) {
        const std::uint64_t bytes = std::min(sample.layout.bytes - at, kMiB + random_() % 2000 * 4096);
        targets.memory.push_back(Buffer::allocate_pageable(bytes).value());
        targets.layout.extents.push_back(
            {.offset = at, .memory = {targets.memory.back().data(), bytes}, .fresh = true});
        at += bytes;
      }
      FileReader reader(engine, open(engine, {&targets}), {.workers = workers, .staging_bytes = 8 * kMiB});
      const Status status = reader.read();
      ASSERT_TRUE(status) << status.error().message;
      expect_filled(targets, sample);
    }
  }
}

TEST_F(FileReaderTest, AFlippedBitIsFoundAndLocated) {
  const Engine engine = make_engine();
  for (int round = 0; round < test::scaled(30); ++round) {
    Sample sample = random_sample(random_, 1 + random_() % (12 * kMiB), root_.file("f"));
    const Sample targets = targets_of(sample, random_, round % 2 == 0);
    const auto& checksums = sample.layout.checksums;
    const std::size_t hit = random_() % checksums.size();
    sample.file[checksums[hit].begin + random_() % (checksums[hit].end - checksums[hit].begin)] ^=
        std::byte{1};
    store(sample);
    FileReader reader(engine, open(engine, {&targets}), {.workers = 2});
    const Status status = reader.read();
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().kind, ErrorKind::corrupt);
    EXPECT_EQ(status.error().path, sample.layout.path);
    ASSERT_TRUE(reader.mismatch());
    EXPECT_EQ(reader.mismatch()->checksum, hit);
    EXPECT_EQ(reader.mismatch()->found, sample.checksum_of(checksums[hit]));
  }
}

TEST_F(FileReaderTest, AFileOfADifferentSizeIsCorrupt) {
  const Engine engine = make_engine();
  Sample sample = random_sample(random_, 100'000, root_.file("f"));
  const Sample targets = targets_of(sample, random_, true);
  for (const std::size_t bytes : {0UZ, 99'999UZ, 100'001UZ}) {
    sample.file.resize(bytes);
    store(sample);
    FileReader reader(engine, open(engine, {&targets}), {});
    const Status status = reader.read();
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().kind, ErrorKind::corrupt);
  }
}

TEST_F(FileReaderTest, EveryFailedCompletionIsReported) {
  const Sample sample = random_sample(random_, 14 * kMiB, root_.file("f"));
  store(sample);
  for (std::uint64_t at = 0;; at += trunkline::test::kPositionStep) {
    const Sample targets = targets_of(sample, random_, true);
    const auto faults = Faults::create();
    faults->fail(Op::read, at, EIO);
    const Engine engine = make_engine({.block_bytes = kMiB, .faults = faults});
    FileReader reader(engine, open(engine, {&targets}), {.workers = 2, .staging_bytes = 8 * kMiB});
    const Status status = reader.read();
    if (faults->injected() == 0) {
      ASSERT_TRUE(status) << status.error().message;
      expect_filled(targets, sample);
      EXPECT_GT(at, 5U);
      break;
    }
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, EIO);
  }
}

TEST_F(FileReaderTest, DisturbedCompletionsChangeNothing) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    const Sample sample = random_sample(random_, 9 * kMiB + seed, root_.file("f"));
    store(sample);
    const Sample targets = targets_of(sample, random_, true);
    const auto faults = Faults::create();
    faults->disturb(seed, 0.2, 0.2);
    const Engine engine = make_engine({.faults = faults});
    FileReader reader(engine, open(engine, {&targets}), {.workers = 2});
    const Status status = reader.read();
    ASSERT_TRUE(status) << status.error().message;
    expect_filled(targets, sample);
  }
}

TEST_F(FileReaderTest, CancelStopsIt) {
  const Engine engine = make_engine();
  const Sample sample = random_sample(random_, 30 * kMiB, root_.file("f"));
  store(sample);
  const Sample targets = targets_of(sample, random_, true);
  FileReader reader(engine, open(engine, {&targets}), {});
  reader.cancel();
  const Status status = reader.read();
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().kind, ErrorKind::cancelled);
}

TEST_F(FileReaderTest, WithoutRoomForABlockDirectReadsStillWork) {
  const Engine engine =
      make_engine({.lanes = 1, .queue_depth = 1, .block_bytes = 4096, .pinned_budget_bytes = 64 * kKiB});
  for (const std::uint64_t misplaced : {0U, 64U}) {
    Sample sample;
    sample.layout = {.path = root_.file("f"), .bytes = 2 * kMiB};
    sample.file.resize(2 * kMiB, std::byte{7});
    store(sample);
    Sample targets;
    targets.layout = sample.layout;
    targets.layout.extents.push_back(
        {.offset = 0, .memory = targets.make_memory(random_, 2 * kMiB, misplaced)});
    FileReader reader(engine, open(engine, {&targets}), {});
    const Status status = reader.read();
    if (misplaced == 0) {
      ASSERT_TRUE(status) << status.error().message;
      expect_filled(targets, sample);
    } else if (File::open(engine, sample.layout.path)->core()->members.front().pair.limits.memory_alignment >
               64) {
      ASSERT_FALSE(status);
      EXPECT_EQ(status.error().kind, ErrorKind::out_of_budget);
    }
  }
}

}  // namespace
}  // namespace trunkline::tensor_file
