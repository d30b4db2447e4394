// Collections that pause between parts, so that saves of other processes can lock the directory meanwhile.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>

#include "checkpoint/names.h"
#include "checkpoint/store_fixture.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

class CollectionPaceTest : public test::StoreTest {
 protected:
  static constexpr std::uint64_t kSteps = 5;

  // Creates in each step a shard that no manifest names; with volumes, also a step that exists on one volume
  // only.
  void make_debris(const StoreOptions& options) const {
    const auto store = open(options);
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      save(*store, step);
      std::ofstream(debris(step)) << "debris";
    }
  }

  std::string debris(std::uint64_t step) const {
    return fmt::format("{}/{}/{}", directory(), step_directory(step), shard_file(0, 1, std::string(16, 'a')));
  }

  std::size_t debris_left() const {
    std::size_t left = 0;
    for (std::uint64_t step = 1; step <= kSteps; ++step) left += fs::exists(debris(step)) ? 1 : 0;
    return left;
  }

  // Opens the directory with collections that pause after each step.
  std::unique_ptr<Store> open_paced(std::function<void()> pause) const {
    return open({.collection_pace = {.first_part = std::chrono::milliseconds(0), .pause = std::move(pause)}});
  }
};

TEST_F(CollectionPaceTest, AnotherStoreSavesInThePauses) {
  for (const bool on_volumes : {false, true}) {
    fs::remove_all(directory());
    const StoreOptions options{.volumes = on_volumes ? volumes() : std::vector<std::string>{}};
    make_debris(options);
    const auto saving = open();
    load(*saving);
    std::uint64_t saved = kSteps;
    const auto store = open_paced([&] { save(*saving, ++saved); });
    const auto collected = store->collect_if_used();
    ASSERT_TRUE(collected) << collected.error().message;
    EXPECT_FALSE(collected->is_busy);
    EXPECT_GT(saved, kSteps + 2) << "it should have paused";
    EXPECT_EQ(debris_left(), 0U) << "it should still remove all debris";
    EXPECT_TRUE(collected->problems.empty());
    std::set<std::string> paths;
    for (const Removed& each : collected->removed) EXPECT_TRUE(paths.insert(each.path).second) << each.path;
    EXPECT_EQ(paths.size(), kSteps);
    for (std::uint64_t step = 1; step <= saved; ++step)
      EXPECT_TRUE(is_whole(*store, *store->read_manifest(step))) << step;
  }
}

TEST_F(CollectionPaceTest, ASaveThatBeginsInAPauseEndsTheCollection) {
  make_debris({});
  const auto saving = open();
  load(*saving);
  std::unique_ptr<SaveTransaction> transaction;
  const auto store = open_paced([&] { transaction = begin(*saving, kSteps + 1); });
  const auto collected = store->collect();
  ASSERT_TRUE(collected) << collected.error().message;
  EXPECT_TRUE(collected->is_busy);
  EXPECT_EQ(collected->removed.size(), 1U);
  EXPECT_EQ(debris_left(), kSteps - 1);
  ASSERT_TRUE(transaction->commit(write_shards(*transaction)));
  EXPECT_TRUE(is_whole(*saving, *saving->read_manifest(kSteps + 1)));
}

// A problem with a volume is reported once, however many parts the collection has.
TEST_F(CollectionPaceTest, ProblemsAreReportedOnce) {
  make_debris({.volumes = volumes()});
  fs::rename(volumes()[1], root_.file("unmounted"));
  for (std::uint64_t step = 1; step <= 3; ++step)
    for (const auto& entry : fs::directory_iterator(fmt::format("{}/{}", directory(), step_directory(step))))
      if (commit_of(entry.path().filename().string())) fs::remove(entry.path());
  int pauses = 0;
  const auto collected = open_paced([&] { ++pauses; })->collect();
  ASSERT_TRUE(collected) << collected.error().message;
  EXPECT_GE(pauses, 4);
  ASSERT_EQ(collected->problems.size(), 1U);
  EXPECT_NE(collected->problems[0].message.find("is missing"), std::string::npos);
}

}  // namespace
}  // namespace trunkline::checkpoint
