// Saving over checkpoints that were not loaded is rejected; with `fresh` they are set aside.
#include "checkpoint/continuation.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "checkpoint/names.h"
#include "checkpoint/store_fixture.h"
#include "checkpoint/volume_owner.h"
#include "os/durable.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

using Steps = std::vector<std::uint64_t>;

class ContinuationTest : public test::StoreTest {
 protected:
  static Error refusal(Store& store, std::uint64_t step) {
    const std::size_t count = std::max<std::size_t>(1, store.descriptor().volumes.size());
    const auto refused = store.begin(step, Steps(count, 1));
    EXPECT_FALSE(refused) << "step " << step;
    if (refused) return {};
    EXPECT_EQ(store.check_continues(step).error().message, refused.error().message);
    return refused.error();
  }

  std::vector<std::string> asides() const {
    std::vector<std::string> found;
    if (!fs::exists(directory())) return found;
    for (const auto& entry : fs::directory_iterator(directory())) {
      if (is_aside_directory(entry.path().filename().string())) found.push_back(entry.path().string());
    }
    std::ranges::sort(found);
    return found;
  }

  static constexpr std::size_t kOldBytes = 6000;  // of the shards of the previous run

  void save_old_run() const {
    const auto store = open({.volumes = {{volumes()[0], root_.file("former")}}});
    save(*store, 7, {}, kOldBytes);
    const auto other = open({.volumes = volumes()});
    save(*other, 8, {}, kOldBytes);
    save(*other, 9, {}, kOldBytes);
  }

  // The number of directories that have a complete checkpoint of the old run (judged by its size).
  std::size_t count_whole(std::uint64_t step) const {
    std::size_t found = 0;
    auto places = asides();
    places.push_back(directory());
    for (const std::string& place : places) {
      const auto store = Store::open(place, {.if_missing = IfMissing::fail});
      if (!store) continue;
      const auto manifest = (*store)->read_manifest(step);
      if (!manifest || manifest->shards.front().bytes != kOldBytes) continue;
      EXPECT_TRUE(is_whole(**store, *manifest)) << place << " step " << step;
      ++found;
    }
    return found;
  }

  // The number of directories that have a checkpoint of the step.
  std::size_t count_of(std::uint64_t step) const {
    auto places = asides();
    places.push_back(directory());
    return static_cast<std::size_t>(std::ranges::count_if(
        places, [&](const std::string& place) { return !commits_in(place, step)->empty(); }));
  }

  void expect_old_run() const {
    for (const std::uint64_t step : {7, 8, 9}) EXPECT_EQ(count_whole(step), 1U) << "step " << step;
  }

  // No collection removes any part of a checkpoint, whatever it reports.
  void collect_everywhere() const {
    auto places = asides();
    places.push_back(directory());
    for (const std::string& place : places) {
      const auto store = Store::open(place);
      ASSERT_TRUE(store) << store.error().message;
      const auto collected = (*store)->collect();
      EXPECT_TRUE(collected || collected.error().kind == ErrorKind::unsupported);
    }
  }
};

TEST_F(ContinuationTest, StepsThatWereNotLoadedAreNotOverwritten) {
  {
    const auto store = open();
    for (const std::uint64_t step : {50, 100, 101}) save(*store, step);
  }
  const auto before = everything();
  const auto fresh_run = open();
  for (const std::uint64_t step : {1, 51, 100, 101}) {
    const Error error = refusal(*fresh_run, step);
    EXPECT_EQ(error.kind, ErrorKind::system);
    EXPECT_EQ(error.code, EEXIST);
    EXPECT_EQ(error.path, directory());
    for (const char* part : {"101", "load()", "another directory", "fresh=True"})
      EXPECT_NE(error.message.find(part), std::string::npos) << error.message;
  }
  EXPECT_EQ(everything(), before) << "nothing may be written";
  EXPECT_TRUE(fresh_run->begin(102, Steps{1})) << "later steps do not conflict";
  load(*fresh_run);
  save(*fresh_run, 51, 2);
  EXPECT_EQ(open()->steps(), (Steps{50, 51}));
  save(*fresh_run, 51, 2);
  EXPECT_EQ(open()->steps(), (Steps{50, 51})) << "it may replace its own saves";
}

TEST_F(ContinuationTest, RetentionKeepsCheckpointsThatWereNeitherLoadedNorSaved) {
  for (const std::uint64_t step : {1, 2}) save(*open(), step);
  const auto one = open();
  const auto other = open();
  const auto save_and_retain = [](Store& store, std::uint64_t step) {
    const auto transaction = begin(store, step);
    EXPECT_TRUE(transaction->commit(write_shards(*transaction)));
    auto collected = transaction->retain(1);
    EXPECT_TRUE(collected) << collected.error().message;
    transaction->release();
    return collected.value_or(CollectionResult{}).problems;
  };
  const auto problems = save_and_retain(*one, 3);
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_EQ(problems.front().code, EEXIST);
  for (const char* part : {"steps 1, 2", "keep=1", "load()", "delete()"})
    EXPECT_NE(problems.front().message.find(part), std::string::npos) << problems.front().message;
  EXPECT_TRUE(save_and_retain(*one, 4).empty()) << "it is reported once";
  EXPECT_EQ(one->steps(), (Steps{1, 2, 4})) << "retention removes its own saves";
  EXPECT_EQ(save_and_retain(*other, 5).size(), 1U);
  EXPECT_EQ(save_and_retain(*one, 6).size(), 1U) << "of step 5";
  EXPECT_EQ(one->steps(), (Steps{1, 2, 5, 6})) << "each keeps its last one";
  load(*one);
  EXPECT_TRUE(save_and_retain(*one, 7).empty());
  EXPECT_EQ(one->steps(), Steps{7});
}

TEST_F(ContinuationTest, RetentionFirstRemovesStepsLaterThanTheRunIsAt) {
  for (const std::uint64_t step : {40, 50, 100, 101}) save(*open(), step);
  auto store = open();
  load(*store);
  save(*store, 51, 4);
  EXPECT_EQ(store->steps(), (Steps{40, 50, 51, 101}));
  store = open();
  load(*store);
  save(*store, 52, 4);
  EXPECT_EQ(store->steps(), (Steps{40, 50, 51, 52})) << "the restarted run is still behind that step";
  save(*store, 53, 3);
  EXPECT_EQ(store->steps(), (Steps{51, 52, 53}));
  save(*store, 52, 2);
  EXPECT_EQ(store->steps(), (Steps{51, 52})) << "also when behind its own saves";
  save(*store, 1, 1);
  EXPECT_EQ(store->steps(), (Steps{1})) << "the last save always stays";
}

TEST_F(ContinuationTest, OthersCheckpointsAreReportedOnceThereAreMoreThanAreKept) {
  for (const std::uint64_t step : {1, 2, 3}) {
    const auto store = open();
    const auto transaction = begin(*store, step);
    ASSERT_TRUE(transaction->commit(write_shards(*transaction)));
    const auto collected = transaction->retain(2);
    ASSERT_TRUE(collected);
    EXPECT_EQ(collected->problems.size(), step > 2 ? 1U : 0U) << "a store for each save, after step " << step;
    transaction->release();
  }
  EXPECT_EQ(open()->steps(), (Steps{1, 2, 3}));
}

TEST_F(ContinuationTest, ASaveDuringALoadStaysKnown) {
  const auto store = open();
  save(*store, 1);
  auto position = store->position();
  ASSERT_TRUE(position);
  save(*store, 2);
  store->continue_from(*std::move(position));
  save(*store, 3, 1);
  EXPECT_EQ(store->steps(), Steps{3});
}

TEST_F(ContinuationTest, AReusedNumberIsADifferentCheckpoint) {
  const auto one = open();
  save(*one, 1);
  const auto other = open();
  load(*other);
  ASSERT_TRUE(other->remove(1));
  EXPECT_EQ(save(*open(), 1), 1U) << "the number of the one that was deleted";
  EXPECT_EQ(refusal(*one, 1).code, EEXIST);
  const auto transaction = begin(*one, 2);
  ASSERT_TRUE(transaction->commit(write_shards(*transaction)));
  ASSERT_TRUE(transaction->retain(1));
  transaction->release();
  EXPECT_EQ(one->steps(), (Steps{1, 2})) << "retention does not remove it either";
  EXPECT_TRUE(is_whole(*one, *one->read_manifest(1)));
}

TEST_F(ContinuationTest, ADamagedCheckpointIsNotOverwrittenEither) {
  save(*open(), 5);
  ASSERT_TRUE(os::write_file_durably(manifest_path(directory(), 5, 1), "{"));
  EXPECT_EQ(refusal(*open(), 1).code, EEXIST);
}

TEST_F(ContinuationTest, AnotherJobsSavesAreDetected) {
  const auto one = open();
  const auto other = open();
  save(*one, 1);
  load(*other);
  save(*other, 2);
  save(*other, 3);
  const Error error = refusal(*one, 2);
  EXPECT_EQ(error.code, EEXIST);
  EXPECT_NE(error.message.find("neither loaded nor saved"), std::string::npos) << error.message;
  EXPECT_NE(error.message.find("steps 2, 3"), std::string::npos) << error.message;
  load(*one);
  save(*one, 2);
  EXPECT_EQ(refusal(*other, 2).code, EEXIST);
}

// Knowledge that came from the previous descriptor does not count.
TEST_F(ContinuationTest, KnownCheckpointsEndWithTheDescriptor) {
  const auto old = open();
  for (const std::uint64_t step : {1, 2, 3, 4}) save(*old, step);
  const auto fresh = open({.fresh = true});
  save(*fresh, 5);
  EXPECT_EQ(fresh->read_manifest(5)->commit, 5U) << "after those that were set aside";
  EXPECT_EQ(refusal(*old, 5).code, EEXIST);
  EXPECT_EQ(refusal(*old, 1).code, EEXIST);
  fs::remove_all(directory());
  save(*open(), 5);
  EXPECT_EQ(refusal(*fresh, 5).code, EEXIST);
}

// For example on a scratch disk from which old files are purged.
TEST_F(ContinuationTest, ARunContinuesWithoutTheDescriptor) {
  const auto store = open();
  for (const std::uint64_t step : {1, 2, 3}) save(*store, step, 2);
  fs::remove(directory() + "/trunkline-checkpoints.json");
  const auto other = Store::open(directory());
  ASSERT_TRUE(other);
  EXPECT_TRUE(store->check_continues(3));
  save(*store, 4, 2);
  save(*store, 4, 2);
  EXPECT_EQ(store->steps(), (Steps{3, 4})) << "retention still counts them as its own";
  EXPECT_TRUE(fs::exists(directory() + "/trunkline-checkpoints.json"));
  save(**other, 9);
  fs::remove(directory() + "/trunkline-checkpoints.json");
  EXPECT_EQ(refusal(*store, 5).code, EEXIST) << "9 is of another";
  EXPECT_TRUE(store->check_continues(10)) << "the same as with the descriptor";
}

// The number of a deleted commit is used again.
TEST_F(ContinuationTest, ASaveAfterADeletionIsNotKnown) {
  const auto one = open();
  save(*one, 100);
  const auto other = open();
  ASSERT_TRUE(other->remove(100));
  load(*other);
  save(*other, 200);
  EXPECT_EQ(other->read_manifest(200)->commit, 1U);
  const Error error = refusal(*one, 150);
  EXPECT_EQ(error.code, EEXIST);
  EXPECT_NE(error.message.find("neither loaded nor saved"), std::string::npos) << error.message;
}

TEST_F(ContinuationTest, AJobDoesNotContinueWhereAnotherHasStartedOver) {
  const auto old = open();
  for (const std::uint64_t step : {1, 2, 3}) save(*old, step);
  save(*open({.fresh = true}), 1);
  for (const std::uint64_t step : {1, 4, 50}) EXPECT_EQ(refusal(*old, step).code, EEXIST);
  EXPECT_EQ(open()->steps(), Steps{1});
}

TEST_F(ContinuationTest, AJobStaysRejectedAfterABeginThatFailedInTheNewRun) {
  const auto job = open();
  save(*job, 1);
  const auto other = open({.volumes = volumes(), .fresh = true});
  save(*other, 1);
  ASSERT_TRUE(other->remove(1));
  EXPECT_FALSE(job->begin(2, Steps{1})) << "the run that took over the directory has two volumes";
  save(*other, 1);
  EXPECT_EQ(refusal(*job, 2).code, EEXIST);
}

TEST_F(ContinuationTest, AFreshRunSetsTheOldOneAside) {
  save_old_run();
  const auto store = open({.fresh = true});
  EXPECT_EQ(store->steps(), (Steps{7, 8, 9})) << "nothing may move before the first save";
  save(*store, 1, 1);
  save(*store, 2, 1);
  EXPECT_EQ(open()->steps(), Steps{2});
  ASSERT_EQ(asides().size(), 1U) << "only the first save sets a run aside";
  expect_old_run();
  collect_everywhere();
  expect_old_run();
  // The folder is itself a directory of checkpoints, and can be continued.
  const auto aside = Store::open(asides()[0]);
  ASSERT_TRUE(aside) << aside.error().message;
  EXPECT_EQ((*aside)->steps(), (Steps{7, 8, 9}));
  EXPECT_EQ((*aside)->latest(), 9U);
  const auto collected = (*aside)->collect();
  ASSERT_TRUE(collected) << collected.error().message;
  EXPECT_TRUE(collected->removed.empty() && collected->problems.empty());
  load(**aside);
  save(**aside, 10, 2);
  EXPECT_EQ((*aside)->steps(), (Steps{9, 10}));
  EXPECT_EQ(open()->steps(), Steps{2});
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(2)));
}

// A step that a user moves back from the run that was set aside must not be removed by another run.
TEST_F(ContinuationTest, AStepMovedBackFromASetAsideRunStays) {
  const auto old = open();
  for (const std::uint64_t step : {100, 200}) save(*old, step, 2);
  auto store = open({.fresh = true});
  for (const std::uint64_t step : {0, 1}) save(*store, step, 2);
  fs::rename(asides().front() + "/" + step_directory(200), directory() + "/" + step_directory(200));
  EXPECT_EQ(open()->latest(), 1U);
  const auto save_and_retain = [](Store& saving, std::uint64_t step) {
    const auto transaction = begin(saving, step);
    EXPECT_TRUE(transaction->commit(write_shards(*transaction)));
    auto collected = transaction->retain(2);
    EXPECT_TRUE(collected) << collected.error().message;
    transaction->release();
    return collected.value_or(CollectionResult{}).problems;
  };
  const auto problems = save_and_retain(*store, 2);
  ASSERT_EQ(problems.size(), 1U) << "the run continues";
  EXPECT_NE(problems.front().message.find("step 200"), std::string::npos) << problems.front().message;
  EXPECT_EQ(store->steps(), (Steps{1, 2, 200}));
  EXPECT_EQ(refusal(*store, 200).code, EEXIST);
  store = open({.volumes = {{root_.file("other")}}});  // changing the descriptor keeps its other contents
  load(*store);
  EXPECT_EQ(save_and_retain(*store, 3).size(), 1U);
  EXPECT_TRUE(save_and_retain(*store, 4).empty()) << "it is reported once";
  EXPECT_EQ(store->steps(), (Steps{3, 4, 200}));
  load(*store);
  save_and_retain(*store, 201);
  EXPECT_EQ(store->steps(), (Steps{4, 200, 201})) << "also in the run that continues";
}

TEST_F(ContinuationTest, AStepMovedBackStaysWhereverSettingAsideStops) {
  for (std::size_t allowed = 0;; ++allowed) {
    for (const auto& entry : fs::directory_iterator(root_.path())) fs::remove_all(entry.path());
    for (const std::uint64_t step : {100, 101}) load_and_save(*open(), step);
    const auto store = open({.fresh = true});
    for (const std::uint64_t step : {0, 1}) save(*store, step);
    fs::rename(asides().front() + "/" + step_directory(100), directory() + "/" + step_directory(100));
    test::CrashPoint crash{.allowed = allowed};
    const bool begun = open({.fresh = true, .watch = crash.watch()})->begin(0, Steps{1}).has_value();
    const auto next = open();
    load(*next);
    const auto transaction = begin(*next, 102);
    EXPECT_TRUE(transaction->commit(write_shards(*transaction)));
    EXPECT_TRUE(transaction->retain(1));
    transaction->release();
    EXPECT_EQ(count_of(100), 1U) << "after " << allowed << " changes";
    if (begun) break;
    ASSERT_LT(allowed, 200U);
  }
}

TEST_F(ContinuationTest, AStepMovedBackStaysWithoutTheDescriptor) {
  for (const std::uint64_t step : {100, 101}) load_and_save(*open(), step);
  const auto store = open({.fresh = true});
  for (const std::uint64_t step : {0, 1}) save(*store, step);
  fs::rename(asides().front() + "/" + step_directory(100), directory() + "/" + step_directory(100));
  fs::remove(directory() + "/" + std::string(kDescriptorFile));
  const auto next = open();
  load(*next);
  const auto transaction = begin(*next, 2);
  EXPECT_TRUE(transaction->commit(write_shards(*transaction)));
  EXPECT_TRUE(transaction->retain(1));
  EXPECT_EQ(next->steps(), (Steps{2, 100}));
}

TEST_F(ContinuationTest, ARunBesideOthersStepsContinuesWithoutTheDescriptor) {
  for (const std::uint64_t step : {1, 2}) save(*open(), step);
  const auto store = open();
  save(*store, 10);
  fs::remove(directory() + "/" + std::string(kDescriptorFile));
  save(*store, 11);
  EXPECT_EQ(store->steps(), (Steps{1, 2, 10, 11}));
}

TEST_F(ContinuationTest, CommitNumbersGrowAcrossRunsThatWereSetAside) {
  for (const std::uint64_t step : {1, 2}) save(*open(), step);
  save(*open({.fresh = true}), 1);
  save(*open({.fresh = true}), 1);
  for (const std::string& aside : asides()) fs::remove_all(aside);
  const auto store = open();
  EXPECT_EQ(store->read_manifest(1)->commit, 4U);
  ASSERT_TRUE(store->remove(1));
  save(*store, 1);
  EXPECT_EQ(store->read_manifest(1)->commit, 4U) << "numbering continues even if the other runs are gone";
}

TEST_F(ContinuationTest, AFailedFreshSaveSetsNoOtherRunAside) {
  save(*open(), 5);
  // Fails once, after the earlier run has moved.
  bool failed = false;
  {
    const auto failing = open({.fresh = true, .watch = [&](auto, const std::string& path) -> Status {
                                 if (path != directory() + "/" + step_directory(1) || failed) return {};
                                 failed = true;
                                 return std::unexpected(make_error(ErrorKind::cancelled, "once", path));
                               }});
    EXPECT_FALSE(failing->begin(1, Steps{1}));
    ASSERT_TRUE(failed);
    ASSERT_EQ(asides().size(), 1U);
    save(*open(), 7);
    EXPECT_EQ(refusal(*failing, 1).code, EEXIST) << "another job saved it meanwhile";
    save(*failing, 9);
  }
  EXPECT_EQ(asides().size(), 1U);
  EXPECT_EQ(open()->steps(), (Steps{7, 9}));
}

TEST_F(ContinuationTest, EachFreshRunSetsAsideWhatItFinds) {
  for (const std::uint64_t step : {1, 2, 3}) save(*open({.fresh = true}), step);
  const auto found = asides();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(open()->steps(), Steps{3});
  EXPECT_EQ((*Store::open(found[0]))->steps(), Steps{1});
  EXPECT_EQ((*Store::open(found[1]))->steps(), Steps{2});
}

TEST_F(ContinuationTest, AFreshRunThatLoadsContinues) {
  save(*open(), 5);
  const auto store = open({.fresh = true});
  load(*store);
  save(*store, 6);
  EXPECT_EQ(store->steps(), (Steps{5, 6}));
  EXPECT_TRUE(asides().empty());
}

TEST_F(ContinuationTest, ARunWithoutItsDescriptorIsSetAsideToo) {
  save_old_run();
  fs::remove(directory() + "/" + std::string(kDescriptorFile));
  save(*open({.volumes = volumes(), .fresh = true}), 1);
  EXPECT_EQ(open()->steps(), Steps{1});
  expect_old_run();
  collect_everywhere();
  expect_old_run();
}

TEST_F(ContinuationTest, WhatCouldNotBeReadInTheFolderIsNotSetAside) {
  save_old_run();
  const std::string step = directory() + "/step-00000008";
  fs::rename(step, root_.file("elsewhere"));
  fs::create_directory_symlink("../elsewhere", step);
  const auto before = everything();
  EXPECT_EQ(open({.fresh = true})->begin(1, Steps{1, 1}).error().kind, ErrorKind::unsupported);
  fs::remove(step);
  fs::create_directory_symlink(root_.file("elsewhere"), step);
  fs::rename(volumes()[1], root_.file("unmounted"));
  EXPECT_EQ(open({.fresh = true})->begin(1, Steps{1, 1}).error().code, ENOENT);
  fs::rename(root_.file("unmounted"), volumes()[1]);
  EXPECT_EQ(everything(), before);
  save(*open({.fresh = true}), 1);
  expect_old_run();
}

// The manifest cannot be read and so does not show which shards it has, but they belong to the folder all the
// same.
TEST_F(ContinuationTest, ARunWithADamagedManifestIsSetAsideWithItsShards) {
  save_old_run();
  const std::string path = manifest_path(directory(), 8, 2);
  const std::string good = *os::read_text(path);
  std::string flipped = good;
  flipped[good.size() / 2] ^= 1;
  ASSERT_TRUE(os::write_file_durably(path, flipped));
  const auto store = open({.fresh = true});
  EXPECT_EQ(store->aside(), std::nullopt);
  const auto transaction = begin(*store, 1);
  ASSERT_EQ(asides().size(), 1U);
  EXPECT_EQ(store->aside(), asides()[0]);
  ASSERT_TRUE(transaction->commit(write_shards(*transaction)));
  EXPECT_EQ(store->aside(), std::nullopt) << "the save is there";
  transaction->release();
  const auto aside = Store::open(asides()[0]);
  ASSERT_TRUE(aside);
  const auto collected = (*aside)->collect();
  ASSERT_TRUE(collected) << collected.error().message;
  EXPECT_EQ(collected->problems.size(), 1U) << "the damaged one";
  load(**aside);
  const auto next = begin(**aside, 10);
  ASSERT_TRUE(next->commit(write_shards(*next))) << "its volumes are its own";
  ASSERT_TRUE(os::write_file_durably(manifest_path(asides()[0], 8, 2), good));
  expect_old_run();
}

TEST_F(ContinuationTest, ACopyIsNotSetAside) {
  save_old_run();
  fs::copy(directory(), root_.file("copy"), fs::copy_options::recursive);
  const auto before = everything();
  const auto copy = Store::open(root_.file("copy"), {.fresh = true});
  ASSERT_TRUE(copy);
  EXPECT_EQ((*copy)->begin(1, Steps{1, 1}).error().kind, ErrorKind::unsupported);
  auto after = everything();
  std::erase(after, "copy/lock");
  auto expected = before;
  std::erase(expected, "copy/lock");
  EXPECT_EQ(after, expected);
}

TEST_F(ContinuationTest, AFailedBeginCanBeRetried) {
  for (std::size_t allowed = 0;; ++allowed) {
    for (const auto& entry : fs::directory_iterator(root_.path())) fs::remove_all(entry.path());
    save(*open(), 1);
    fs::remove(directory() + "/" + std::string(kDescriptorFile));  // a copy of a step alone has none
    test::CrashPoint crash{.allowed = allowed};
    const auto store = open({.watch = crash.watch()});
    load(*store);
    if (store->begin(2, Steps{1})) break;
    crash.allowed = std::numeric_limits<std::size_t>::max();
    const auto again = store->begin(2, Steps{1});
    EXPECT_TRUE(again) << "after " << allowed << " changes: " << again.error().message;
    ASSERT_LT(allowed, 50U);
  }
}

// At every point: the old run is complete, no collection on either side damages it, and another fresh run
// continues.
TEST_F(ContinuationTest, SettingAsideMayStopBeforeAnyOfItsChanges) {
  std::size_t stops = 0;
  for (std::size_t allowed = 0;; ++allowed) {
    for (const auto& entry : fs::directory_iterator(root_.path())) fs::remove_all(entry.path());
    save_old_run();
    test::CrashPoint crash{.allowed = allowed};
    bool begun = false;
    {
      const auto store = open({.fresh = true, .watch = crash.watch()});
      begun = store->begin(1, Steps{1, 1}).has_value();
    }
    const std::string where = fmt::format("after {} changes", allowed);
    expect_old_run();
    collect_everywhere();
    expect_old_run();
    ASSERT_FALSE(HasFailure()) << where;
    if (!open()->steps()->empty()) {
      const auto plain = open();
      EXPECT_EQ(refusal(*plain, 1).code, EEXIST) << where;
    }
    save(*open({.fresh = true}), 1, 1);
    EXPECT_EQ(open()->steps(), Steps{1}) << where;
    expect_old_run();
    collect_everywhere();
    expect_old_run();
    ASSERT_FALSE(HasFailure()) << where;
    if (begun) break;
    ++stops;
    ASSERT_LT(allowed, 200U);
  }
  EXPECT_GT(stops, 12U) << "folder, descriptors, volumes, three steps, homes";
}

// In a run that went back, the step that was committed last does not have the highest number.
TEST_F(ContinuationTest, TheLatestStepStaysTheLatestWhereverSettingAsideStops) {
  for (std::size_t allowed = 0;; ++allowed) {
    for (const auto& entry : fs::directory_iterator(root_.path())) fs::remove_all(entry.path());
    const auto old = open();
    for (const std::uint64_t step : {50, 100, 51}) {
      load(*old);
      save(*old, step);
    }
    test::CrashPoint crash{.allowed = allowed};
    if (open({.fresh = true, .watch = crash.watch()})->begin(1, Steps{1})) break;
    const auto store = open();
    if (store->steps()->empty()) continue;
    EXPECT_EQ(store->latest(), 51U) << "after " << allowed << " changes";
    load(*store);
    save(*store, 52);
    EXPECT_EQ(store->read_manifest(52)->commit, 4U) << "above all steps that moved";
    ASSERT_LT(allowed, 200U);
  }
}

// The same for a run that continues after the crash, with what is left in the directory.
TEST_F(ContinuationTest, ARunThatContinuesAfterSuchACrashKeepsWhatHasMoved) {
  for (std::size_t allowed = 0;; ++allowed) {
    for (const auto& entry : fs::directory_iterator(root_.path())) fs::remove_all(entry.path());
    save_old_run();
    test::CrashPoint crash{.allowed = allowed};
    const bool begun = open({.fresh = true, .watch = crash.watch()})->begin(1, Steps{1, 1}).has_value();
    if (begun) break;
    Steps moved;
    for (const std::string& aside : asides()) {
      const auto there = Store::open(aside, {.if_missing = IfMissing::fail});
      if (!there) continue;
      const Steps steps = (*there)->steps().value_or(Steps());
      moved.insert(moved.end(), steps.begin(), steps.end());
    }
    const auto store = open();
    load(*store);
    const auto transaction = begin(*store, 20);
    const auto commit = transaction->commit(write_shards(*transaction));
    ASSERT_TRUE(commit) << commit.error().message;
    ASSERT_TRUE(transaction->retain(1));
    transaction->release();
    collect_everywhere();
    EXPECT_EQ(open()->steps(), Steps{20});
    EXPECT_TRUE(is_whole(*store, *store->read_manifest(20)));
    for (const std::uint64_t step : moved) EXPECT_EQ(count_whole(step), 1U) << step << " after " << allowed;
    ASSERT_FALSE(HasFailure()) << allowed;
    ASSERT_LT(allowed, 200U);
  }
}

}  // namespace
}  // namespace trunkline::checkpoint
