// Candidates, the shape of trials, scratch files and options.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "cli/tune/candidates.h"
#include "cli/tune/scratch_files.h"
#include "cli/tune/trial_bench.h"
#include "cli/tune/tune_options.h"
#include "support/temp_directory.h"
#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

const Choices kChoices{.defaults = {BackendKind::io_uring, 2, 32, 4 * kMiB, true},
                       .backends = {BackendKind::io_uring, BackendKind::libaio, BackendKind::threads},
                       .cores = 4,
                       .can_be_direct = true};

TEST(Candidates, BeginWithTheDefaultsAndHaveNoneTwice) {
  const auto all = candidates(kChoices);
  EXPECT_EQ(all.front(), kChoices.defaults);
  EXPECT_EQ(std::ranges::count(all, kChoices.defaults), 1);
  for (const Candidate& each : all) {
    EXPECT_EQ(std::ranges::count(all, each), 1);
    EXPECT_TRUE(tuning::are_valid(settings_of(each, kChoices.defaults)));
    EXPECT_LE(each.bytes_in_flight(), 512 * kMiB);
  }
  EXPECT_GT(all.size(), 80U);
  EXPECT_EQ(candidates(kChoices), all);  // the same each time
}

TEST(Candidates, OfferOnlyWhatWorks) {
  Choices choices = kChoices;
  choices.can_be_direct = false;
  choices.defaults.direct = false;
  choices.backends = {BackendKind::threads};
  choices.cores = 1;
  for (const Candidate& each : candidates(choices)) {
    EXPECT_FALSE(each.direct);
    if (each == choices.defaults) continue;
    EXPECT_EQ(each.backend, BackendKind::threads);
    EXPECT_LE(each.lanes, 2U);
  }
}

TEST(Candidates, KeepNothingOfTheDefaults) {
  EXPECT_TRUE(settings_of(kChoices.defaults, kChoices.defaults).is_default());
  Candidate other = kChoices.defaults;
  other.lanes = 4;
  const auto settings = settings_of(other, kChoices.defaults);
  EXPECT_EQ(settings.lanes, 4U);
  EXPECT_EQ(settings.backend, BackendKind::io_uring);
  EXPECT_EQ(settings.direct, std::nullopt);
  EXPECT_EQ(distance(other, kChoices.defaults), 1U);
  other.direct = false;
  EXPECT_EQ(settings_of(other, kChoices.defaults).direct, false);
}

TEST(TrialShape, FitsItsMemoryAndKeepsWholeBlocks) {
  for (const Candidate& each : candidates(kChoices)) {
    for (const Order order : {Order::sequential, Order::random}) {
      for (const std::uint64_t files : {1, 8}) {
        for (const std::uint64_t bytes : {1 * kMiB, 100 * kMiB, 4 * kGiB}) {
          const RingShape shape = trial_shape(each, order, files, bytes, 128 * kMiB);
          EXPECT_LE(shape.bytes(files), 128 * kMiB);
          EXPECT_GE(shape.batches_per_file * shape.pieces, 1U);
          EXPECT_EQ(shape.piece_bytes % (order == Order::random ? kRandomBytes : each.block_bytes), 0U);
        }
      }
    }
  }
}

TEST(TrialShape, KeepsTheQueueFullWhereThereIsMemory) {
  const Candidate candidate{BackendKind::io_uring, 2, 32, kMiB, true};
  EXPECT_GE(trial_shape(candidate, Order::sequential, 1, 4 * kGiB, kGiB).bytes(1),
            2 * candidate.bytes_in_flight());
  EXPECT_GE(trial_shape(candidate, Order::random, 1, 4 * kGiB, kGiB).bytes(1), 2 * 64 * kRandomBytes);
}

TEST(ScratchFiles, AreRemoved) {
  const test::TempDirectory directory;
  std::string path;
  {
    const auto files = ScratchFiles::create(std::vector{directory.path()});
    ASSERT_TRUE(files) << files.error().message;
    path = files->paths().front();
    EXPECT_TRUE(std::filesystem::exists(path));
    EXPECT_TRUE(os::is_temporary_name(std::filesystem::path(path).filename().string()));
    EXPECT_TRUE(files->drop_page_cache());
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(ScratchFiles, LeaveHalfOfTheFreeSpace) {
  const test::TempDirectory directory;
  const auto space = std::filesystem::space(directory.path());
  const std::vector<std::string> one{directory.path()};
  const std::vector<std::string> two{directory.path(), directory.path()};
  EXPECT_EQ(*scratch_bytes(one, 64 * kMiB), 64 * kMiB);
  const auto most = *scratch_bytes(one, std::uint64_t{1} << 60);
  EXPECT_LE(most, space.available / 2 + kGiB);  // others use the filesystem, too
  EXPECT_LE(*scratch_bytes(two, std::uint64_t{1} << 60), most / 2 + kGiB);
  EXPECT_EQ(scratch_bytes(one, kMiB).error().code, ENOSPC);
  EXPECT_EQ(scratch_bytes(std::vector<std::string>{"/proc/self/status"}, kGB).error().kind,
            ErrorKind::invalid_argument);
  EXPECT_FALSE(scratch_bytes(std::vector<std::string>{"/no/such/directory"}, kGB));
}

TEST(TuneOptions, AreChecked) {
  TuneOptions options{.paths = {"/d"}};
  EXPECT_TRUE(check(options));
  options.budget_s = 1;
  EXPECT_FALSE(check(options));
  EXPECT_FALSE(check(TuneOptions{}));
  EXPECT_TRUE(check(TuneOptions{.forget = true}));
  EXPECT_FALSE(check(TuneOptions{.paths = {"/d"}, .merge = true}));
  EXPECT_FALSE(check(TuneOptions{.export_file = "f", .forget = true}));
}

}  // namespace
}  // namespace trunkline::cli
