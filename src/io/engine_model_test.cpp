// Compares files with a simple model, a vector of bytes. On every backend, with and without disturbed
// completions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
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

class ModelTest : public testing::TestWithParam<std::tuple<BackendKind, bool, Direct>> {
 protected:
  void SetUp() override {
    const auto [kind, disturbed, direct] = GetParam();
    const EngineOptions options = test::small_engine(kind, disturbed, 16);
    faults_ = options.faults;
    auto engine = Engine::create(options);
    if (!engine) GTEST_SKIP() << engine.error().message;
    engine_ = *engine;
    open_.direct = direct;
  }

  std::size_t misalignment() {
    const std::size_t choices[] = {0, 0, 64, 16, 1, 512};
    return choices[random_() % 6];
  }

  TempDirectory directory_;
  std::mt19937_64 random_{23};
  std::shared_ptr<Faults> faults_;
  Engine engine_;
  OpenOptions open_;
};

TEST_P(ModelTest, RandomReadsAndWritesMatch) {
  constexpr std::uint64_t kMaxBytes = 700'000;
  open_.mode = Mode::write;
  auto file = File::open(engine_, directory_.file("model"), open_);
  ASSERT_TRUE(file) << file.error().message;
  std::vector<std::byte> model;
  for (int round = 0; round < test::scaled(150); ++round) {
    std::uint64_t offset = random_() % kMaxBytes;
    if (random_() % 3 == 0) offset = offset / 4096 * 4096;
    std::uint64_t length = random_() % (random_() % 2 == 0 ? 9000 : 300'000);
    if (random_() % 3 == 0) length = length / 4096 * 4096;
    TestMemory memory(length, misalignment());
    if (random_() % 2 == 0) {
      test::fill_random(memory.span(), random_());
      auto written = random_() % 2 == 0 ? file->pwrite(memory.view(), offset)
                                        : file->async_pwrite(memory.view(), offset).result();
      ASSERT_TRUE(written) << written.error().message;
      ASSERT_EQ(*written, length);
      if (length > 0) {
        if (model.size() < offset + length) model.resize(offset + length);
        std::memcpy(model.data() + offset, memory.data(), length);
      }
    } else {
      auto read = random_() % 2 == 0 ? file->pread(memory.view(), offset)
                                     : file->async_pread(memory.view(), offset).result();
      if (length == 0) {
        ASSERT_TRUE(read);
      } else if (offset + length > model.size()) {
        ASSERT_FALSE(read);
        ASSERT_EQ(read.error().kind, ErrorKind::end_of_file) << read.error().message;
      } else {
        ASSERT_TRUE(read) << read.error().message;
        ASSERT_EQ(std::memcmp(memory.data(), model.data() + offset, length), 0)
            << "at " << offset << " + " << length;
      }
    }
    ASSERT_EQ(file->size().value(), model.size());
    if (round % 40 == 39) {
      ASSERT_TRUE(file->sync());
      const std::uint64_t cut = random_() % (model.size() + 1);
      ASSERT_TRUE(file->truncate(cut));
      model.resize(cut);
    }
  }
  if (faults_) {
    EXPECT_GT(faults_->injected(), 0U);
  }
}

// Adjacent ranges at any alignment, written concurrently: every byte must come from its own write, though the
// edges share pages with direct writes nearby.
TEST_P(ModelTest, ConcurrentAdjacentWritesDoNotDisturbEachOther) {
  for (int round = 0; round < test::scaled(6); ++round) {
    open_.mode = Mode::write;
    auto file = File::open(engine_, directory_.file("neighbours"), open_);
    ASSERT_TRUE(file) << file.error().message;
    std::vector<std::uint64_t> cuts = {0};
    while (cuts.size() < 60) cuts.push_back(cuts.back() + 1 + random_() % 40'000);
    TestMemory all(cuts.back(), misalignment());
    test::fill_random(all.span(), random_());
    std::vector<std::size_t> order(cuts.size() - 1);
    for (std::size_t index = 0; index < order.size(); ++index) order[index] = index;
    std::ranges::shuffle(order, random_);
    std::vector<Request> requests;
    for (const std::size_t index : order) {
      requests.push_back({.op = Op::write,
                          .file = &*file,
                          .memory = {all.data() + cuts[index], cuts[index + 1] - cuts[index]},
                          .offset = cuts[index]});
    }
    const auto futures = engine_.submit(requests);
    auto written = wait_all(futures);
    ASSERT_TRUE(written) << written.error().message;
    ASSERT_EQ(*written, cuts.back());
    TestMemory back(cuts.back(), misalignment());
    auto read = file->pread(back.view(), 0);
    ASSERT_TRUE(read) << read.error().message;
    ASSERT_EQ(std::memcmp(all.data(), back.data(), all.size()), 0);
    // Also through the other I/O path, to check that the page cache and the disk agree.
    auto cached =
        File::open(engine_, directory_.file("neighbours"), {.mode = Mode::read, .direct = Direct::never});
    ASSERT_TRUE(cached);
    std::memset(back.data(), 0, back.size());
    ASSERT_TRUE(cached->pread(back.view(), 0));
    ASSERT_EQ(std::memcmp(all.data(), back.data(), all.size()), 0);
  }
}

TEST_P(ModelTest, OverlappingReadsInOneBatch) {
  open_.mode = Mode::write;
  auto file = File::open(engine_, directory_.file("overlap"), open_);
  ASSERT_TRUE(file) << file.error().message;
  TestMemory content(500'000);
  test::fill_random(content.span(), 5);
  ASSERT_TRUE(file->pwrite(content.view(), 0));
  std::vector<TestMemory> targets;
  std::vector<std::uint64_t> offsets;
  for (int index = 0; index < 100; ++index) {
    const std::uint64_t length = 1 + random_() % 100'000;
    offsets.push_back(random_() % (content.size() - length));
    targets.emplace_back(length, misalignment());
  }
  std::vector<Request> requests;
  for (std::size_t index = 0; index < targets.size(); ++index)
    requests.push_back(
        {.op = Op::read, .file = &*file, .memory = targets[index].view(), .offset = offsets[index]});
  const auto futures = engine_.submit(requests);
  ASSERT_TRUE(wait_all(futures));
  for (std::size_t index = 0; index < targets.size(); ++index)
    ASSERT_EQ(std::memcmp(targets[index].data(), content.data() + offsets[index], targets[index].size()), 0)
        << index;
}

INSTANTIATE_TEST_SUITE_P(Every, ModelTest,
                         testing::Combine(testing::ValuesIn(test::all_backends()), testing::Bool(),
                                          testing::Values(Direct::automatic, Direct::never)),
                         [](const auto& variant) {
                           return std::string(to_string(std::get<0>(variant.param))) +
                                  (std::get<1>(variant.param) ? "_disturbed" : "") +
                                  (std::get<2>(variant.param) == Direct::never ? "_buffered" : "");
                         });

}  // namespace
}  // namespace trunkline
