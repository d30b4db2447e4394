// Listing a directory of checkpoints while others change it.
#include "checkpoint/listing.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "checkpoint/names.h"
#include "support/temp_directory.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

bool has_checkpoint(const Result<std::vector<StepEntry>>& entries) {
  EXPECT_TRUE(entries) << entries.error().message;
  return entries && std::ranges::any_of(*entries, [](const auto& each) { return !each.commits.empty(); });
}

TEST(ListingTest, ADirectoryThatAlwaysHasACheckpointIsNeverListedWithoutOne) {
  const test::TempDirectory root;
  const std::string directory = root.file("run");
  const auto commit = [&](std::uint64_t number) {
    fs::create_directories(fmt::format("{}/{}", directory, step_directory(number)));
    const std::ofstream manifest(manifest_path(directory, number, number));
  };
  commit(1);
  std::atomic<bool> over = false;
  std::jthread writer([&] {
    // Like a run that keeps one checkpoint: the next exists before the last one is removed.
    for (std::uint64_t number = 2; number <= 1000; ++number) {
      commit(number);
      fs::remove_all(fmt::format("{}/{}", directory, step_directory(number - 1)));
    }
    over = true;
  });
  int lacking = 0;
  while (!over) lacking += has_checkpoint(list_steps(directory)) ? 0 : 1;
  EXPECT_EQ(lacking, 0);
}

TEST(ListingTest, AStepThatCannotBeExaminedIsAnErrorAndNotAbsent) {
  const test::TempDirectory root;
  const std::string directory = root.file("run");
  const std::string folder = fmt::format("{}/{}", directory, step_directory(1));
  fs::create_directories(folder);
  EXPECT_EQ(step_directories_in(directory), (std::vector<std::uint64_t>{1}));
  fs::remove(folder);
  fs::create_directory_symlink(directory + "/nowhere", folder);
  EXPECT_EQ(step_directories_in(directory), (std::vector<std::uint64_t>{})) << "a dangling link";
  fs::remove(folder);
  fs::create_directory_symlink(std::string(300, 'x'), folder);
  const auto steps = step_directories_in(directory);
  ASSERT_FALSE(steps);
  EXPECT_EQ(steps.error().code, ENAMETOOLONG);
  EXPECT_FALSE(list_steps(directory));
}

// A directory of steps whose folders have settled: the clock of the cache is a minute ahead.
class ListingCacheTest : public testing::Test {
 protected:
  ListingCacheTest() { fs::create_directory(directory_); }

  std::string folder(std::uint64_t step) const {
    return fmt::format("{}/{}", directory_, step_directory(step));
  }
  void commit(std::uint64_t step, std::uint64_t number) const {
    fs::create_directories(folder(step));
    const std::ofstream manifest(manifest_path(directory_, step, number));
  }
  void expect_what_is_there(ListingCache& cache) const {
    const auto found = list_steps(directory_, cache);
    ASSERT_TRUE(found) << found.error().message;
    EXPECT_EQ(list_steps(directory_), *found);
  }
  // How many folders a listing has read.
  std::uint64_t reads_of_a_listing() {
    const std::uint64_t before = cache_.reads();
    expect_what_is_there(cache_);
    return cache_.reads() - before;
  }
  static timespec in_a_minute() {
    timespec now = ListingCache::realtime_clock();
    now.tv_sec += 60;
    return now;
  }

  const test::TempDirectory root_;
  const std::string directory_ = root_.file("run");
  ListingCache cache_{in_a_minute};
};

TEST_F(ListingCacheTest, AFolderIsReadAgainOnlyWhenItHasChanged) {
  for (std::uint64_t step = 1; step <= 20; ++step) commit(step, step);
  EXPECT_EQ(reads_of_a_listing(), 20U);
  EXPECT_EQ(reads_of_a_listing(), 0U);
  commit(21, 21);
  EXPECT_EQ(reads_of_a_listing(), 1U);
  commit(5, 22);
  EXPECT_EQ(reads_of_a_listing(), 1U);
  fs::remove(manifest_path(directory_, 5, 22));
  EXPECT_EQ(reads_of_a_listing(), 1U);
  fs::remove_all(folder(7));
  EXPECT_EQ(reads_of_a_listing(), 0U);
}

TEST_F(ListingCacheTest, AFolderThatWasExchangedIsReadAgain) {
  for (std::uint64_t step = 1; step <= 3; ++step) commit(step, step);
  reads_of_a_listing();
  fs::rename(folder(1), folder(4));
  fs::rename(folder(2), folder(1));
  fs::rename(folder(4), folder(2));
  EXPECT_EQ(reads_of_a_listing(), 2U);
  fs::remove_all(folder(3));
  reads_of_a_listing();
  commit(3, 9);
  EXPECT_EQ(reads_of_a_listing(), 1U);
}

TEST_F(ListingCacheTest, AFolderThatHasJustChangedIsReadAgain) {
  ListingCache now;
  commit(1, 1);
  for (std::uint64_t number = 2; number <= 200; ++number) {
    commit(1, number);
    expect_what_is_there(now);
  }
  EXPECT_EQ(now.reads(), 199U);
}

}  // namespace
}  // namespace trunkline::checkpoint
