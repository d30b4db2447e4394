// Reads of many ranges as one operation, compared with a copy of the files in memory. On every backend, with
// and without disturbed completions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>
#include <tuple>

#include "support/engines.h"
#include "support/sanitizers.h"
#include "support/temp_directory.h"
#include "support/test_memory.h"
#include "trunkline/trunkline.h"

namespace trunkline {
namespace {

using test::TempDirectory;
using test::TestMemory;

constexpr std::byte kUntouched{0x5A};

class ReadRangesTest : public testing::TestWithParam<std::tuple<BackendKind, bool, Direct>> {
 protected:
  void SetUp() override {
    const auto [kind, disturbed, direct] = GetParam();
    auto engine = Engine::create(test::small_engine(kind, disturbed, 16));
    if (!engine) GTEST_SKIP() << engine.error().message;
    engine_ = *engine;
  }

  // A file of random bytes, plain or striped.
  File file(const std::string& name, std::vector<std::byte>& contents, bool striped) {
    const OpenOptions options{.mode = Mode::write, .direct = std::get<2>(GetParam())};
    Result<File> opened;
    if (striped) {
      for (const char* part : {"-0", "-1"}) std::filesystem::create_directory(directory_.file(name + part));
      auto volume = Volume::create({directory_.file(name + "-0"), directory_.file(name + "-1")},
                                   {.stripe_bytes = 8 * kKiB});
      EXPECT_TRUE(volume) << volume.error().message;
      opened = volume->open(engine_, name, options);
    } else {
      opened = File::open(engine_, directory_.file(name), options);
    }
    EXPECT_TRUE(opened) << opened.error().message;
    TestMemory memory(contents.size());
    test::fill_random(memory.span(), random_());
    std::ranges::copy(memory.span(), contents.begin());
    EXPECT_TRUE(opened->pwrite(memory.view(), 0));
    return *opened;
  }

  // Ranges of any size, some of them neighbours in the file, at positions that do not overlap, in any order.
  std::vector<FileRange> random_ranges(const std::vector<std::vector<std::byte>>& contents, std::size_t count,
                                       std::uint64_t& memory_bytes) {
    std::vector<FileRange> ranges;
    memory_bytes = 0;
    std::uint64_t next = 0;
    for (std::size_t index = 0; index < count; ++index) {
      FileRange range{.file = static_cast<std::uint32_t>(random_() % contents.size())};
      const std::uint64_t file_bytes = contents[range.file].size();
      range.length = random_() % (random_() % 8 == 0 ? 200'000 : 6'000);
      if (random_() % 4 == 0) range.length = range.length / 4096 * 4096;
      range.offset = random_() % 2 == 0 ? next + random_() % 5'000 : random_() % file_bytes;
      if (random_() % 4 == 0) range.offset = range.offset / 4096 * 4096;
      range.offset = std::min(range.offset, file_bytes);
      range.length = std::min(range.length, file_bytes - range.offset);
      next = range.offset + range.length;
      if (random_() % 3 == 0) memory_bytes += random_() % 5'000;
      range.position = memory_bytes;
      memory_bytes += range.length;
      ranges.push_back(range);
    }
    std::ranges::shuffle(ranges, random_);
    return ranges;
  }

  TempDirectory directory_;
  std::mt19937_64 random_{29};
  Engine engine_;
};

TEST_P(ReadRangesTest, EveryRangeArrivesAtItsPosition) {
  std::vector<std::vector<std::byte>> contents(3);
  std::vector<File> files;
  for (std::size_t index = 0; index < contents.size(); ++index) {
    contents[index].resize(300'000 + random_() % 10'000);
    files.push_back(file("data" + std::to_string(index), contents[index],
                         index == 2 && std::get<0>(GetParam()) != BackendKind::memory));
  }
  for (int round = 0; round < test::scaled(40); ++round) {
    std::uint64_t memory_bytes = 0;
    const auto ranges = random_ranges(contents, random_() % 120, memory_bytes);
    TestMemory memory(memory_bytes + 64, round % 3 == 0 ? 0 : 24);
    std::ranges::fill(memory.span(), kUntouched);
    std::vector<std::byte> expected(memory.size(), kUntouched);
    std::uint64_t total = 0;
    for (const FileRange& range : ranges) {
      if (range.length > 0)
        std::memcpy(expected.data() + range.position, contents[range.file].data() + range.offset,
                    range.length);
      total += range.length;
    }
    Request request{.memory = memory.view()};
    request.ranges = std::make_shared<const FileRanges>(FileRanges{files, ranges});
    const auto read = engine_.submit({&request, 1}).front().result();
    ASSERT_TRUE(read) << read.error().message;
    ASSERT_EQ(*read, total);
    ASSERT_EQ(std::memcmp(memory.data(), expected.data(), expected.size()), 0) << "round " << round;
  }
  for (const File& each : files) EXPECT_EQ(each.pending(), 0U);
}

TEST_P(ReadRangesTest, ARangeBeyondTheEndIsNamed) {
  std::vector<std::byte> contents(100'000);
  const File read = file("data", contents, false);
  std::vector<FileRange> ranges;
  for (std::uint64_t index = 0; index < 30; ++index)
    ranges.push_back({.offset = index * 3'000, .length = 1'000, .position = index * 1'000});
  ranges[7].offset = 99'500;
  TestMemory memory(30'000);
  const auto result = read.read_ranges(memory.view(), ranges);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().kind, ErrorKind::end_of_file);
  EXPECT_NE(result.error().message.find("(range 7)"), std::string::npos) << result.error().message;
  EXPECT_NE(result.error().message.find("ends at 100000"), std::string::npos) << result.error().message;
}

INSTANTIATE_TEST_SUITE_P(Every, ReadRangesTest,
                         testing::Combine(testing::ValuesIn(test::all_backends()), testing::Bool(),
                                          testing::Values(Direct::automatic, Direct::never)),
                         [](const auto& variant) {
                           return std::string(to_string(std::get<0>(variant.param))) +
                                  (std::get<1>(variant.param) ? "_disturbed" : "") +
                                  (std::get<2>(variant.param) == Direct::never ? "_buffered" : "");
                         });

class FaultyRangesTest : public test::OnEveryBackend {
 protected:
  void open(EngineOptions options = {}) {
    faults_ = Faults::create();
    options.lanes = 1;
    options.faults = faults_;
    engine_ = make_engine(options);
    auto opened = File::open(engine_, directory_.file("data"), {.mode = Mode::write});
    ASSERT_TRUE(opened) << opened.error().message;
    file_ = *opened;
    contents_.resize(200'000);
    TestMemory memory(contents_.size());
    test::fill_random(memory.span(), 3);
    std::ranges::copy(memory.span(), contents_.begin());
    ASSERT_TRUE(file_.pwrite(memory.view(), 0));
  }

  // Small ranges with small gaps, which are read together where direct I/O is possible.
  std::vector<FileRange> neighbours(std::uint64_t count) const {
    std::vector<FileRange> ranges;
    for (std::uint64_t index = 0; index < count; ++index)
      ranges.push_back({.offset = 100 + index * 1'500, .length = 1'000, .position = index * 1'000});
    return ranges;
  }

  void expect_read(const std::vector<FileRange>& ranges, TestMemory& memory) {
    for (const FileRange& range : ranges)
      ASSERT_EQ(std::memcmp(memory.data() + range.position, contents_.data() + range.offset, range.length), 0)
          << range.offset;
  }

  bool is_direct() const {
    const auto explanation = engine_.explain(directory_.path());
    return GetParam() != BackendKind::memory && explanation && explanation->direct;
  }

  TempDirectory directory_;
  std::shared_ptr<Faults> faults_;
  Engine engine_;
  File file_;
  std::vector<std::byte> contents_;
};

TEST_P(FaultyRangesTest, NeighboursAreOneTransfer) {
  open();
  if (!is_direct()) GTEST_SKIP() << "no direct I/O here";
  const auto ranges = neighbours(20);
  TestMemory memory(20'000);
  const auto read = file_.read_ranges(memory.view(), ranges);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, 20'000U);
  expect_read(ranges, memory);
  EXPECT_EQ(faults_->commands(Op::read), 1U);
  EXPECT_EQ(engine_.stats().bytes_bounced, 20'000U);
}

TEST_P(FaultyRangesTest, WhatIsTooFarAwayOrDoesNotFitIsAnotherTransfer) {
  open({.block_bytes = 64 * kKiB});
  if (!is_direct()) GTEST_SKIP() << "no direct I/O here";
  const struct {
    FileRange first;
    FileRange second;
    std::uint64_t transfers;
  } cases[] = {
      {{.offset = 100, .length = 1'000}, {.offset = 1'100 + 4'096, .length = 1'000}, 1},
      {{.offset = 100, .length = 1'000}, {.offset = 1'100 + 4'097, .length = 1'000}, 2},
      // Rounded to the alignment, within a slot, and more.
      {{.offset = 30'000, .length = 35'000}, {.offset = 65'600, .length = 28'608}, 1},
      {{.offset = 30'000, .length = 35'000}, {.offset = 65'600, .length = 33'000}, 2},
      {{.offset = 5'000, .length = 1'000}, {.offset = 100, .length = 1'000}, 1},  // sorted by offset first
  };
  for (auto [first, second, transfers] : cases) {
    SCOPED_TRACE(second.offset);
    second.position = first.length;
    const std::vector<FileRange> ranges{first, second};
    TestMemory memory(first.length + second.length, 1);
    const std::uint64_t before = faults_->commands(Op::read);
    ASSERT_TRUE(file_.read_ranges(memory.view(), ranges));
    expect_read(ranges, memory);
    EXPECT_EQ(faults_->commands(Op::read) - before, transfers);
  }
}

// A bad sector between two ranges must not make them unreadable.
TEST_P(FaultyRangesTest, RangesOfATransferThatFailsAreReadOneByOne) {
  open();
  if (!is_direct()) GTEST_SKIP() << "no direct I/O here";
  const auto ranges = neighbours(20);
  faults_->fail(Op::read, 0, EIO);
  TestMemory memory(20'000);
  const auto read = file_.read_ranges(memory.view(), ranges);
  ASSERT_TRUE(read) << read.error().message;
  expect_read(ranges, memory);
  EXPECT_EQ(faults_->commands(Op::read), 21U);
}

TEST_P(FaultyRangesTest, TheRangeThatCannotBeReadIsNamed) {
  open();
  if (!is_direct()) GTEST_SKIP() << "no direct I/O here";
  faults_->fail(Op::read, 0, EIO);
  faults_->fail(Op::read, 1 + 5, EIO);
  TestMemory memory(20'000);
  const auto read = file_.read_ranges(memory.view(), neighbours(20));
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, EIO);
  EXPECT_NE(read.error().message.find("(range 5)"), std::string::npos) << read.error().message;
  EXPECT_EQ(file_.pending(), 0U);
}

TEST_P(FaultyRangesTest, WithoutMemoryForSlotsEachRangeIsReadAlone) {
  open({.block_bytes = 64 * kKiB, .pinned_budget_bytes = 4096});
  const auto ranges = neighbours(20);
  TestMemory memory(20'000);
  const auto read = file_.read_ranges(memory.view(), ranges);
  ASSERT_TRUE(read) << read.error().message;
  expect_read(ranges, memory);
}

TEST_P(FaultyRangesTest, CancellingDropsWhatWasNotSent) {
  open({.queue_depth = 1});
  faults_->hold(Op::read, 0);
  std::vector<FileRange> ranges;
  for (std::uint64_t index = 0; index < 10; ++index)
    ranges.push_back({.offset = index * 20'000, .length = 1'000, .position = index * 1'000});
  TestMemory memory(10'000);
  Future future = file_.async_read_ranges(memory.view(), ranges);
  EXPECT_EQ(future.description(), "reading 10000 bytes in 10 ranges of " + file_.path());
  while (faults_->commands(Op::read) == 0) std::this_thread::yield();
  EXPECT_TRUE(future.cancel());
  faults_->release();
  const auto result = future.result();
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().kind, ErrorKind::cancelled);
  EXPECT_EQ(faults_->commands(Op::read), 1U);
  EXPECT_EQ(file_.pending(), 0U);
}

TEST_P(FaultyRangesTest, InvalidRangesFailBeforeAnythingIsRead) {
  open();
  TestMemory memory(1'000);
  const auto message = [&](FileRange range) {
    const auto result = file_.read_ranges(memory.view(), {{.length = 10}, range});
    EXPECT_FALSE(result);
    EXPECT_EQ(result.error().kind, ErrorKind::invalid_argument);
    return result.error().message;
  };
  constexpr std::uint64_t kHuge = std::uint64_t{1} << 63;
  EXPECT_NE(message({.length = 1'001}).find("range 1: 1001 bytes at position 0 do not fit"),
            std::string::npos);
  EXPECT_NE(message({.length = 1, .position = 1'000}).find("do not fit"), std::string::npos);
  EXPECT_NE(message({.length = 1, .position = ~std::uint64_t{0}}).find("do not fit"), std::string::npos);
  EXPECT_NE(message({.offset = kHuge, .length = 1}).find("largest file offset"), std::string::npos);
  EXPECT_NE(message({.offset = 1, .length = kHuge}).find("largest file offset"), std::string::npos);
  EXPECT_NE(message({.length = 1, .file = 1}).find("is of file 1, but there are 1"), std::string::npos);
  EXPECT_EQ(faults_->commands(Op::read), 0U);
  EXPECT_EQ(file_.read_ranges(memory.view(), {}).value(), 0U);
  EXPECT_EQ(file_.read_ranges(memory.view(), {{.offset = 5}}).value(), 0U);
  ASSERT_TRUE(file_.close());
  EXPECT_EQ(file_.read_ranges(memory.view(), {{.length = 1}}).error().kind, ErrorKind::closed);
}

INSTANTIATE_TEST_SUITE_P(Every, FaultyRangesTest, testing::ValuesIn(test::all_backends()),
                         test::backend_name);

}  // namespace
}  // namespace trunkline
