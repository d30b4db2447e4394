#include "checkpoint/store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <set>

#include "checkpoint/names.h"
#include "checkpoint/store_fixture.h"
#include "os/durable.h"
#include "os/temporary_file.h"
#include "os/unique_fd.h"

namespace trunkline::checkpoint {
namespace {

class StoreTest : public test::StoreTest {};

using Steps = std::vector<std::uint64_t>;

TEST_F(StoreTest, WhatWasCommittedIsRead) {
  const auto store = open();
  const auto transaction = begin(*store, 12);
  ASSERT_EQ(transaction->placement().paths.size(), 2U);
  EXPECT_TRUE(is_shard_file(transaction->placement().shards[1].file));
  EXPECT_TRUE(transaction->placement().shards[1].file.starts_with("shard-00001-of-00002-"));
  EXPECT_EQ(transaction->placement().paths[1],
            directory() + "/step-00000012/" + transaction->placement().shards[1].file);
  Manifest manifest = write_shards(*transaction);
  EXPECT_EQ(store->steps(), Steps{}) << "not before it is committed";
  ASSERT_EQ(transaction->commit(manifest), 1U);
  transaction->release();
  const auto read = open()->read_manifest(12);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(read->time.starts_with("20")) << read->time;
  manifest.commit = 1;
  manifest.time = read->time;
  EXPECT_EQ(*read, manifest);
  EXPECT_TRUE(is_whole(*store, *read));
  EXPECT_EQ(store->steps(), Steps{12});
  EXPECT_EQ(store->latest(), 12U);
}

TEST_F(StoreTest, ShardsLieOnTheVolumesAndTheRestInTheDirectory) {
  const auto store = open({.volumes = volumes()});
  save(*store, 3);
  const std::string id = store->descriptor().id;
  std::set<std::string> directories;
  for (const std::string& path : everything()) {
    if (path.ends_with(".safetensors")) directories.insert(path.substr(0, path.rfind('/')));
  }
  EXPECT_EQ(directories,
            (std::set<std::string>{"v0/run-" + id + "/step-00000003", "v1/run-" + id + "/step-00000003"}));
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(3)));
  // Another directory of the same name shares the volumes.
  const auto other = Store::open(root_.file("other/run"), {.volumes = volumes()});
  ASSERT_TRUE(other) << other.error().message;
  save(**other, 3);
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(3)));
  EXPECT_TRUE(is_whole(**other, *(*other)->read_manifest(3)));
  const auto collected = (*other)->collect();
  EXPECT_TRUE(collected && collected->removed.empty() && collected->problems.empty());
}

TEST_F(StoreTest, AMovedDirectoryIsReadAndGoesOn) {
  for (const bool on_volumes : {false, true}) {
    const std::string from = root_.file(on_volumes ? "a1" : "a0");
    const std::string to = root_.file(on_volumes ? "b1" : "b0");
    const StoreOptions options{.volumes = on_volumes ? volumes() : std::vector<std::string>{}};
    save(**Store::open(from, options), 1);
    std::filesystem::rename(from, to);
    const auto moved = Store::open(to, options);
    ASSERT_TRUE(moved) << moved.error().message;
    EXPECT_TRUE(is_whole(**moved, *(*moved)->read_manifest(1)));
    EXPECT_EQ(load_and_save(**moved, 2, 1), 2U);
    EXPECT_EQ((*moved)->steps(), Steps{2});
    EXPECT_TRUE(is_whole(**moved, *(*moved)->read_manifest(2)));
  }
}

TEST_F(StoreTest, VolumesMayChangeBetweenSaves) {
  save(*open(), 1);
  save(*open({.volumes = volumes()}), 2);
  const auto without_first = open({.volumes = {{volumes()[1]}}});
  EXPECT_EQ(without_first->descriptor().volumes.size(), 1U);
  EXPECT_EQ(without_first->descriptor().former_volumes.size(), 1U);
  save(*without_first, 3);
  const auto store = open();
  EXPECT_EQ(store->descriptor(), without_first->descriptor()) << "as the directory has them";
  for (const std::uint64_t step : {1, 2, 3})
    EXPECT_TRUE(is_whole(*store, *store->read_manifest(step))) << step;
  load_and_save(*store, 4, 1);
  EXPECT_EQ(store->steps(), Steps{4});
  for (const std::string& path : everything())
    EXPECT_TRUE(!path.ends_with(".safetensors") || path.find("step-00000004") != std::string::npos) << path;
  const auto back = open({.volumes = volumes()});
  EXPECT_EQ(back->descriptor().volumes.size(), 2U);
  EXPECT_TRUE(back->descriptor().former_volumes.empty());
  EXPECT_EQ(Store::open(directory(), {.volumes = {{}}, .if_missing = IfMissing::fail}).error().kind,
            ErrorKind::invalid_argument);
}

TEST_F(StoreTest, SavingAStepAgainReplacesItAndBecomesTheLatest) {
  const auto store = open();
  save(*store, 5);
  save(*store, 9);
  const auto old = store->read_manifest(5);
  const auto transaction = begin(*store, 5);
  Manifest manifest = write_shards(*transaction, 777);
  EXPECT_EQ(*store->read_manifest(5), *old) << "readers see the old one until the new one is committed";
  EXPECT_EQ(transaction->commit(manifest), 3U);
  EXPECT_EQ(store->read_manifest(5)->commit, 3U);
  EXPECT_TRUE(is_whole(*store, *old)) << "nothing goes before retain()";
  const auto collected = transaction->retain(std::nullopt);
  ASSERT_TRUE(collected);
  EXPECT_EQ(collected->removed.size(), 3U) << "a manifest and two shards";
  EXPECT_EQ(store->latest(), 5U);
  EXPECT_EQ(store->steps(), (Steps{5, 9}));
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(5)));
  EXPECT_FALSE(is_whole(*store, *old));
}

TEST_F(StoreTest, RetentionGoesByCommitsAndRemovesAllOfAStep) {
  const auto store = open({.volumes = volumes()});
  for (const std::uint64_t step : {30, 10, 20}) save(*store, step, 3);
  save(*store, 5, 3);
  EXPECT_EQ(store->steps(), (Steps{5, 10, 20})) << "30 was committed first";
  save(*store, 10, 1);
  EXPECT_EQ(store->steps(), Steps{10});
  for (const std::string& path : everything()) {
    for (const char* step : {"step-00000005", "step-00000020", "step-00000030"})
      EXPECT_EQ(path.find(step), std::string::npos) << path;
  }
}

TEST_F(StoreTest, FilesOfOthersAreNeverTouched) {
  const auto store = open({.volumes = volumes()});
  save(*store, 1);
  const std::vector<std::string> foreign = {
      directory() + "/step-00000001/notes.txt",
      store->descriptor().volumes[0] + "/step-00000001/model.safetensors", directory() + "/readme",
      directory() + "/step-7", root_.file("v0/step-00000001")};
  for (const std::string& path : foreign) std::ofstream(path) << "x";
  save(*store, 2, 1);
  ASSERT_TRUE(store->collect());
  for (const std::string& path : foreign) EXPECT_TRUE(std::filesystem::exists(path)) << path;
  EXPECT_EQ(store->steps(), Steps{2});
}

TEST_F(StoreTest, ADamagedCheckpointIsKeptNotCountedAndNamed) {
  const auto store = open();
  for (const std::uint64_t step : {1, 2, 3}) save(*store, step);
  const std::string path = manifest_path(directory(), 2, 2);
  auto text = *os::read_text(path);
  text[text.size() / 2] ^= 1;
  ASSERT_TRUE(os::write_file_durably(path, text));
  std::ofstream(directory() + "/step-00000002/" + shard_file(7, 8, random_hex(16))) << "may belong to it";
  const auto before = everything();

  const auto collected = store->collect();
  ASSERT_TRUE(collected);
  EXPECT_TRUE(collected->removed.empty());
  ASSERT_EQ(collected->problems.size(), 1U);
  EXPECT_EQ(collected->problems[0].kind, ErrorKind::corrupt);
  EXPECT_EQ(collected->problems[0].path, path);
  EXPECT_EQ(everything(), before);
  EXPECT_EQ(store->read_manifest(2).error().kind, ErrorKind::corrupt);

  const auto transaction = begin(*store, 4);
  ASSERT_TRUE(transaction->commit(Manifest{.step = 4, .volumes = {"."}}));
  const auto retained = transaction->retain(2);
  ASSERT_TRUE(retained);
  EXPECT_EQ(retained->problems.size(), 1U);
  EXPECT_EQ(store->steps(), (Steps{2, 3, 4}));
}

// Saves step after step with a loss each, and returns the steps that stay.
class RetentionTest : public StoreTest {
 protected:
  Steps save_all(Store& store, const std::vector<std::optional<double>>& losses, std::uint64_t keep,
                 const AlsoKeep& also) {
    for (std::size_t step = 0; step < losses.size(); ++step) {
      const auto transaction = begin(store, step);
      Manifest manifest = write_shards(*transaction, 200);
      if (losses[step]) {
        manifest.features = {std::string(kMetricsFeature)};
        manifest.metrics = {{"other", -static_cast<double>(step)}, {"loss", *losses[step]}};
      }
      EXPECT_TRUE(transaction->commit(manifest));
      const auto retained = transaction->retain(keep, also);
      EXPECT_TRUE(retained) << retained.error().message;
      EXPECT_TRUE(retained->problems.empty());
    }
    return *store.steps();
  }
};

TEST_F(RetentionTest, ACheckpointStaysIfAnyRuleKeepsIt) {
  const std::vector<std::optional<double>> losses{0.5, 0.1, 0.4, std::nullopt, 0.2, std::nan(""), 0.9, 0.8};
  const auto store = open();
  const BestRule lowest{.metric = "loss", .order = BestRule::Order::min, .count = 2};
  EXPECT_EQ(save_all(*store, losses, 1, {.every = 3, .best = lowest}), (Steps{0, 1, 3, 4, 6, 7}));
}

TEST_F(RetentionTest, TheHighestAreTheBestWhereTheRuleSaysSo) {
  const auto store = open();
  const BestRule highest{.metric = "loss", .order = BestRule::Order::max, .count = 1};
  EXPECT_EQ(save_all(*store, {0.5, 0.9, 0.9, std::nan(""), 0.1}, 1, {.best = highest}), (Steps{1, 4}));
}

TEST_F(RetentionTest, ABestCheckpointWhoseManifestIsDamagedStays) {
  const auto store = open();
  const BestRule lowest{.metric = "loss", .order = BestRule::Order::min, .count = 1};
  EXPECT_EQ(save_all(*store, {0.1, 0.2}, 1, {.best = lowest}), (Steps{0, 1}));
  std::filesystem::resize_file(manifest_path(directory(), 0, 1), 100);
  const auto transaction = begin(*store, 2);
  ASSERT_TRUE(transaction->commit(write_shards(*transaction, 200)));
  const auto retained = transaction->retain(1, {.best = lowest});
  ASSERT_TRUE(retained);
  EXPECT_EQ(retained->problems.size(), 1U);
  EXPECT_EQ(*store->steps(), (Steps{0, 1, 2}));
}

TEST_F(RetentionTest, RulesThatKeepNothingAreRejected) {
  const auto store = open();
  const auto transaction = begin(*store, 1);
  ASSERT_TRUE(transaction->commit(write_shards(*transaction, 200)));
  EXPECT_EQ(transaction->retain(1, {.every = 0}).error().kind, ErrorKind::invalid_argument);
  const BestRule none{.metric = "loss", .order = BestRule::Order::min, .count = 0};
  EXPECT_EQ(transaction->retain(1, {.best = none}).error().kind, ErrorKind::invalid_argument);
}

// A manifest of a million tensors takes seconds to parse, and a training opens its directory with several.
TEST_F(StoreTest, CollectionReadsALargeManifestOnlyWhereFilesMayGo) {
  const auto store = open({.volumes = volumes()});
  const auto transaction = begin(*store, 1);
  Manifest manifest = write_shards(*transaction);
  manifest.state = '"' + std::string(100'000, 'x') + '"';
  ASSERT_TRUE(transaction->commit(manifest));
  transaction->release();
  const std::string path = manifest_path(directory(), 1, 1);
  const std::string good = *os::read_text(path);
  std::string flipped = good;
  flipped.back() ^= 1;
  const auto problems = [&](const std::string& text) {
    EXPECT_TRUE(os::write_file_durably(path, text));
    const auto before = everything();
    const auto collected = store->collect();
    EXPECT_EQ(everything(), before);
    return collected->problems.size();
  };
  EXPECT_EQ(problems(good), 0U);
  EXPECT_EQ(problems(flipped), 0U);  // was not read
  EXPECT_EQ(problems(good.substr(0, good.size() - 1)), 1U);
  EXPECT_EQ(problems("trunkline checkpoint 9 x\n" + good), 1U);
  // Whatever does not look like one save alone.
  const std::string volume = store->descriptor().volumes[1] + "/step-00000001/";
  const std::string nonce(16, '0');
  for (const std::string& debris : {directory() + "/step-00000001/.trunkline-0000000000000022.tmp",
                                    volume + shard_file(0, 1, nonce), volume + shard_file(0, 4, nonce)}) {
    std::ofstream(debris) << "1";
    EXPECT_EQ(problems(flipped), 1U) << debris;
    ASSERT_TRUE(os::write_file_durably(path, good));
    EXPECT_EQ(store->collect()->bytes(), 1U);
    EXPECT_FALSE(std::filesystem::exists(debris));
  }
  std::filesystem::remove(shard_path(directory(), *store->read_manifest(1), 3));
  EXPECT_EQ(problems(flipped), 1U);
}

TEST_F(StoreTest, AManifestUnderAnotherNameIsCorrupt) {
  const auto store = open();
  save(*store, 1);
  std::filesystem::create_directory(directory() + "/step-00000002");
  std::filesystem::copy_file(manifest_path(directory(), 1, 1), manifest_path(directory(), 2, 7));
  const auto read = store->read_manifest(2);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().kind, ErrorKind::corrupt);
  EXPECT_NE(read.error().message.find("moved or copied"), std::string::npos);
}

TEST_F(StoreTest, CollectionRemovesDebrisEverywhere) {
  auto store = open({.volumes = volumes()});
  save(*store, 1);
  const auto clean = everything();
  write_shards(*begin(*store, 2));
  store.reset();  // a crash
  store = open();
  const std::string hex = random_hex(16);
  std::ofstream(directory() + "/.trunkline-0000000000000011.tmp") << "12345";
  std::ofstream(directory() + "/step-00000001/.trunkline-0000000000000022.tmp") << "123";
  std::ofstream(store->descriptor().volumes[1] + "/step-00000001/" + shard_file(0, 1, hex)) << "1";
  std::filesystem::create_directory(store->descriptor().volumes[0] + "/step-00000099");
  const auto with_debris = everything();

  const auto dry = store->collect(GarbageCollector::DryRun::yes);
  ASSERT_TRUE(dry) << dry.error().message;
  EXPECT_EQ(everything(), with_debris);
  const auto collected = store->collect();
  ASSERT_TRUE(collected) << collected.error().message;
  auto after = everything();
  std::erase(after, "run/lock");
  auto expected = clean;
  std::erase(expected, "run/lock");
  EXPECT_EQ(after, expected);
  EXPECT_EQ(collected->bytes(), 4U * 5000 + 5 + 3 + 1);
  EXPECT_EQ(dry->bytes(), collected->bytes());
  ASSERT_EQ(dry->removed.size(), collected->removed.size());
  for (std::size_t i = 0; i < dry->removed.size(); ++i)
    EXPECT_EQ(dry->removed[i].path, collected->removed[i].path);
  EXPECT_TRUE(store->collect()->removed.empty());
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(1)));
}

TEST_F(StoreTest, RemovingAStepRemovesAllOfItAndNothingElse) {
  const auto store = open({.volumes = volumes()});
  for (const std::uint64_t step : {1, 2, 3}) save(*store, step);
  auto text = *os::read_text(manifest_path(directory(), 2, 2));
  text.back() ^= 1;
  ASSERT_TRUE(os::write_file_durably(manifest_path(directory(), 2, 2), text));
  for (const std::uint64_t step : {2, 3}) {
    const auto removed = open()->remove(step);
    ASSERT_TRUE(removed) << removed.error().message;
    for (const std::string& path : everything())
      EXPECT_EQ(path.find(step_directory(step)), std::string::npos) << path;
  }
  EXPECT_EQ(store->steps(), Steps{1});
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(1)));
  const Error missing = store->remove(3).error();
  EXPECT_EQ(missing.code, ENOENT);
  EXPECT_NE(missing.message.find("it has step 1"), std::string::npos) << missing.message;
  const auto transaction = begin(*store, 4);
  EXPECT_EQ(open()->remove(1).error().code, EBUSY);
  EXPECT_EQ(store->remove(1).error().code, EBUSY);
  transaction->release();
  ASSERT_TRUE(store->remove(1));
  EXPECT_EQ(store->latest(), std::nullopt);
}

// tl.save() writes into any directory without the lock of this one.
TEST_F(StoreTest, WhatAnotherWritesIsNotDebris) {
  const auto store = open({.volumes = volumes()});
  save(*store, 1);
  const std::vector<std::string> paths{os::temporary_name(directory()),
                                       os::temporary_name(directory() + "/step-00000001"),
                                       os::temporary_name(store->descriptor().volumes[0]),
                                       os::temporary_name(store->descriptor().volumes[0] + "/step-00000001")};
  {
    std::vector<os::UniqueFd> files;
    std::vector<std::unique_ptr<os::WriterClaim>> claims;
    for (const std::string& path : paths) {
      files.emplace_back(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
      ASSERT_TRUE(files.back().valid());
      claims.push_back(std::make_unique<os::WriterClaim>(files.back().get()));
    }
    for (const auto dry_run : {GarbageCollector::DryRun::yes, GarbageCollector::DryRun::no}) {
      const auto collected = store->collect(dry_run);
      ASSERT_TRUE(collected) << collected.error().message;
      EXPECT_TRUE(collected->removed.empty());
    }
    save(*store, 2, 1);
    for (const std::string& path : paths) EXPECT_TRUE(std::filesystem::exists(path)) << path;
    claims.clear();
  }
  EXPECT_EQ(store->collect()->removed.size(), paths.size() + 2)
      << "and the directories of the step that went";
  for (const std::string& path : paths) EXPECT_FALSE(std::filesystem::exists(path)) << path;
}

// Real processes: some write files into the directory, others open it and collect.
TEST_F(StoreTest, ProcessesThatWriteAndCollectDoNotMeet) {
  constexpr int kRounds = 100;
  save(*open(), 1);
  std::vector<pid_t> children;
  for (int number = 0; number < 4; ++number) {
    const pid_t child = ::fork();
    if (child == 0) {
      int failures = 0;
      for (int round = 0; round < kRounds; ++round) {
        if (number < 2) {
          failures += os::write_file_durably(fmt::format("{}/note{}", directory(), number), "x") ? 0 : 1;
        } else {
          failures += open()->collect() ? 0 : 1;
        }
      }
      ::_exit(failures);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

// One new directory, opened and saved into by two processes at once: each saves, or hears of the other.
TEST_F(StoreTest, ProcessesThatMakeOneDirectoryAtOnce) {
  for (int round = 0; round < 20; ++round) {
    const std::string path = root_.file(fmt::format("new{}", round));
    std::vector<pid_t> children;
    for (std::uint64_t step = 1; step <= 2; ++step) {
      const pid_t child = ::fork();
      if (child == 0) {
        const auto store = Store::open(path, {.volumes = volumes()});
        if (!store) ::_exit(1);
        for (;;) {
          const auto transaction = (*store)->begin(step, Steps{1, 1});
          if (!transaction && transaction.error().code == EBUSY) continue;
          if (!transaction) ::_exit(transaction.error().code == EEXIST ? 0 : 2);
          ::_exit((*transaction)->commit(write_shards(**transaction)) ? 0 : 3);
        }
      }
      children.push_back(child);
    }
    for (const pid_t child : children) {
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    }
    const auto store = Store::open(path);
    ASSERT_TRUE(store) << store.error().message;
    EXPECT_TRUE((*store)->collect());
    const auto steps = (*store)->steps();
    ASSERT_TRUE(steps && !steps->empty());
    for (const std::uint64_t step : *steps) EXPECT_TRUE(is_whole(**store, *(*store)->read_manifest(step)));
  }
}

TEST_F(StoreTest, AManifestThatIsADeviceIsDamage) {
  const auto store = open();
  save(*store, 1);
  const std::string path = manifest_path(directory(), 1, 1);
  ASSERT_EQ(::unlink(path.c_str()), 0);
  ASSERT_EQ(::symlink("/dev/zero", path.c_str()), 0);
  const auto read = store->read_manifest(1);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().kind, ErrorKind::corrupt);
  EXPECT_NE(read.error().message.find("not a regular file"), std::string::npos) << read.error().message;
  EXPECT_TRUE(open()->collect()) << "it is a problem of the step, not of the directory";
}

TEST_F(StoreTest, OneSavesAtATimeAndCollectionWaitsForNobody) {
  const auto store = open();
  const auto transaction = begin(*store, 1);
  const auto other = open();
  EXPECT_EQ(other->begin(2, Steps{1}).error().code, EBUSY);
  EXPECT_EQ(store->begin(2, Steps{1}).error().code, EBUSY);
  EXPECT_TRUE(other->collect()->is_busy);
  EXPECT_TRUE(other->collect(GarbageCollector::DryRun::yes)->is_busy);
  EXPECT_TRUE(store->collect()->is_busy);
  EXPECT_EQ(open({.volumes = volumes()})->begin(2, Steps{1, 1}).error().code, EBUSY);
  transaction->release();
  EXPECT_FALSE(other->collect()->is_busy);
  EXPECT_TRUE(other->begin(2, Steps{1}));
}

TEST_F(StoreTest, AForkedChildHasNoPartInASave) {
  auto store = open();
  auto transaction = begin(*store, 1);
  const pid_t child = ::fork();
  if (child == 0) {
    int failures = 0;
    if (!open()->collect()->is_busy) failures |= 1;  // its parent saves
    if (store->begin(2, Steps{1}).error().code != EBUSY) failures |= 2;
    if (transaction->commit({.step = 1}).error().kind != ErrorKind::invalid_argument) failures |= 4;
    if (transaction->retain(1).error().kind != ErrorKind::invalid_argument) failures |= 8;
    if (!transaction->abandon()) failures |= 16;
    transaction.reset();
    store.reset();
    if (!open()->collect()->is_busy) failures |= 32;
    ::_exit(failures);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(open()->collect()->is_busy);
  transaction->release();
  EXPECT_FALSE(open()->collect()->is_busy);
}

TEST_F(StoreTest, AbandoningLeavesNothing) {
  const auto store = open({.volumes = volumes()});
  save(*store, 1);
  const auto before = everything();
  for (const std::uint64_t step : {1, 2}) {
    const auto transaction = begin(*store, step);
    write_shards(*transaction);
    const auto collected = transaction->abandon();
    ASSERT_TRUE(collected && collected->problems.empty());
    EXPECT_GE(collected->removed.size(), 4U);
    EXPECT_EQ(everything(), before);
    EXPECT_TRUE(transaction->abandon()->removed.empty()) << "it has ended";
  }
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(1)));
}

TEST_F(StoreTest, ASaveThatIsDroppedIsReleasedAndItsShardsStay) {
  const auto store = open();
  auto transaction = begin(*store, 1);
  write_shards(*transaction);
  const auto before = everything();
  transaction.reset();
  EXPECT_EQ(everything(), before);
  EXPECT_TRUE(store->begin(2, Steps{1})) << "and this one is dropped at once";
  EXPECT_EQ(store->collect()->removed.size(), 4U) << "two shards, and the directories of both steps";
}

TEST_F(StoreTest, ASaveMayOutliveItsStore) {
  auto store = open();
  const auto transaction = begin(*store, 1);
  store.reset();
  EXPECT_TRUE(open()->collect()->is_busy);
  EXPECT_EQ(transaction->commit(write_shards(*transaction)), 1U);
  EXPECT_TRUE(transaction->retain(1));
  transaction->release();
  EXPECT_FALSE(open()->collect()->is_busy);
  EXPECT_EQ(open()->steps(), Steps{1});
}

// Also while the object of a save that has ended, or that a parent has begun, is still there.
TEST_F(StoreTest, ASaveThatHasEndedLeavesTheNextOneAlone) {
  const auto store = open();
  auto ended = begin(*store, 1);
  ended->release();
  const auto transaction = begin(*store, 2);
  EXPECT_EQ(ended->commit(write_shards(1, ended->placement())).error().kind, ErrorKind::invalid_argument);
  ended->release();
  EXPECT_TRUE(ended->abandon()->removed.empty());
  ended.reset();
  EXPECT_TRUE(open()->collect()->is_busy);
  EXPECT_TRUE(transaction->commit(write_shards(*transaction)));
}

TEST_F(StoreTest, AForkedChildSavesOnceItsParentHasReleased) {
  const auto store = open();
  auto parents = begin(*store, 1);
  const auto released = ::eventfd(0, EFD_CLOEXEC);
  ASSERT_GE(released, 0);
  const pid_t child = ::fork();
  if (child == 0) {
    eventfd_t value = 0;
    if (::eventfd_read(released, &value) != 0) ::_exit(1);
    const auto own = store->begin(2, Steps{1});
    if (!own) ::_exit(2);
    parents.reset();
    if (!open()->collect()->is_busy) ::_exit(3);
    ::_exit((*own)->commit(write_shards(**own)) ? 0 : 4);
  }
  parents->release();
  EXPECT_EQ(::eventfd_write(released, 1), 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(open()->steps(), Steps{2});
  ::close(released);
}

TEST_F(StoreTest, NothingIsCommittedThatIsNotThere) {
  const auto store = open();
  const auto transaction = begin(*store, 1);
  const Manifest good = write_shards(*transaction);
  Manifest bad = good;
  bad.shards[1].bytes = 4999;
  bad.tensors.clear();
  EXPECT_EQ(transaction->commit(bad).error().kind, ErrorKind::corrupt);
  bad = good;
  bad.step = 2;
  EXPECT_EQ(transaction->commit(bad).error().kind, ErrorKind::invalid_argument);
  bad = good;
  bad.tensors[0].shape = {1};
  EXPECT_EQ(transaction->commit(bad).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(transaction->retain(1).error().kind, ErrorKind::invalid_argument);
  std::filesystem::rename(transaction->placement().paths[0], transaction->placement().paths[0] + "x");
  EXPECT_EQ(transaction->commit(good).error().code, ENOENT);
  EXPECT_EQ(store->steps(), Steps{});
  std::filesystem::rename(transaction->placement().paths[0] + "x", transaction->placement().paths[0]);
  EXPECT_TRUE(transaction->commit(good));
  EXPECT_EQ(transaction->commit(good).error().kind, ErrorKind::invalid_argument) << "twice";
  EXPECT_EQ(transaction->retain(0).error().kind, ErrorKind::invalid_argument);
  transaction->release();
  EXPECT_EQ(transaction->commit(good).error().kind, ErrorKind::invalid_argument) << "it has ended";
}

TEST_F(StoreTest, ArgumentsThatMakeNoSense) {
  const auto store = open({.volumes = volumes()});
  EXPECT_EQ(store->begin(1, Steps{1}).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(store->begin(kMaxNumber + 1, Steps{1, 1}).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(store->begin(1, Steps{1, 1ULL << 40}).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(Store::open("").error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(Store::open(root_.file("x"), {.volumes = {{"/a", "/b/../a"}}}).error().kind,
            ErrorKind::invalid_argument);
  EXPECT_EQ(Store::open(root_.file("x"), {.if_missing = IfMissing::fail}).error().code, ENOENT);
  std::ofstream(root_.file("file")) << "x";
  EXPECT_EQ(Store::open(root_.file("file")).error().code, ENOTDIR);
  EXPECT_EQ(Store::open(root_.file("file/x")).error().code, ENOTDIR);
}

TEST_F(StoreTest, AVolumeThatIsNotMountedIsNamed) {
  const auto store = open({.volumes = volumes()});
  const auto transaction = begin(*store, 1);
  ASSERT_TRUE(transaction->abandon());
  const std::string gone = store->descriptor().volumes[1];
  std::filesystem::remove_all(gone);
  const auto refused = store->begin(1, Steps{1, 1});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().path, gone);
  EXPECT_NE(refused.error().message.find("Mount its volume"), std::string::npos);
  EXPECT_TRUE(store->begin(1, Steps{1, 0})) << "not needed, and not locked";
}

TEST_F(StoreTest, WithoutItsDescriptorADirectoryIsStillRead) {
  save(*open({.volumes = volumes()}), 1);
  const std::string descriptor = directory() + "/trunkline-checkpoints.json";
  auto text = *os::read_text(descriptor);
  text[text.find("v0")] ^= 1;
  ASSERT_TRUE(os::write_file_durably(descriptor, text));
  EXPECT_EQ(Store::open(directory()).error().kind, ErrorKind::corrupt);
  std::filesystem::remove(descriptor);
  const auto reader = open({.if_missing = IfMissing::fail});
  EXPECT_TRUE(is_whole(*reader, *reader->read_manifest(1)));
  EXPECT_FALSE(std::filesystem::exists(descriptor));
  const auto store = open({.volumes = volumes()});
  load_and_save(*store, 2, 1);
  EXPECT_EQ(store->steps(), Steps{2});
  for (const std::string& path : everything())
    EXPECT_TRUE(!path.ends_with(".safetensors") || path.find("step-00000002") != std::string::npos) << path;
}

TEST_F(StoreTest, AReadOnlyDirectoryIsReadAndLookedThrough) {
  if (::geteuid() == 0) GTEST_SKIP() << "root writes everywhere";
  save(*open(), 1);
  std::filesystem::remove(directory() + "/lock");
  std::filesystem::permissions(directory(), std::filesystem::perms(0555));
  const auto store = open({.if_missing = IfMissing::fail});
  EXPECT_TRUE(store->read_manifest(1));
  EXPECT_TRUE(store->collect(GarbageCollector::DryRun::yes));
  EXPECT_EQ(store->collect().error().code, EACCES);
  EXPECT_EQ(store->begin(2, Steps{1}).error().code, EACCES);
  std::filesystem::permissions(directory(), std::filesystem::perms(0755));
}

}  // namespace
}  // namespace trunkline::checkpoint
