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

}  // namespace
}  // namespace trunkline::checkpoint
