// A save, its retention and the collection of debris, stopped before any of their changes to the disk.
#include <gtest/gtest.h>

#include <cerrno>
#include <iterator>
#include <map>
#include <random>
#include <set>

#include "checkpoint/names.h"
#include "checkpoint/store_fixture.h"

namespace trunkline::checkpoint {
namespace {

using test::CrashPoint;
using Kind = DirectoryOps::Kind;

class StoreCrashTest : public test::StoreTest {
 protected:
  using Steps = std::vector<std::uint64_t>;

  void clear() const {
    for (const auto& entry : std::filesystem::directory_iterator(root_.path()))
      std::filesystem::remove_all(entry.path());
  }

  std::unique_ptr<Store> open_with(CrashPoint& crash) const {
    auto store = Store::open(directory(), {.volumes = volumes(), .watch = crash.watch()});
    if (!store) return nullptr;
    load(**store);
    return std::move(*store);
  }

  struct Outcome {
    bool committed = false;
    bool finished = false;
  };

  // A save that may be stopped anywhere; what is not written by then is missing.
  static Outcome try_save(Store& store, std::uint64_t step, std::optional<std::uint64_t> keep) {
    Outcome outcome;
    const Steps one_each(std::max<std::size_t>(1, store.descriptor().volumes.size()), 1);
    const auto transaction = store.begin(step, one_each);
    if (!transaction) return outcome;
    outcome.committed = (*transaction)->commit(write_shards(**transaction)).has_value();
    if (!outcome.committed) return outcome;
    const auto collected = (*transaction)->retain(keep);
    outcome.finished = collected && collected->problems.empty();
    return outcome;
  }

  // Every checkpoint that is there is whole.
  static std::map<std::uint64_t, std::uint64_t> commits_that_are_there(const Store& store) {
    std::map<std::uint64_t, std::uint64_t> found;
    const auto steps = store.steps();
    EXPECT_TRUE(steps) << steps.error().message;
    for (const std::uint64_t step : steps.value_or(Steps())) {
      const auto manifest = store.read_manifest(step);
      EXPECT_TRUE(manifest) << manifest.error().message;
      if (!manifest) continue;
      EXPECT_TRUE(is_whole(store, *manifest)) << "step " << step << " commit " << manifest->commit;
      found[step] = manifest->commit;
    }
    return found;
  }

  // After a collection there is what the manifests name and nothing else.
  void expect_no_debris(Store& store) const {
    const auto collected = store.collect();
    ASSERT_TRUE(collected) << collected.error().message;
    ASSERT_FALSE(collected->is_busy);
    EXPECT_TRUE(collected->problems.empty());
    std::set<std::string> named;
    for (const auto& [step, commit] : commits_that_are_there(store)) {
      const auto manifest = store.read_manifest(step);
      named.insert(manifest_path(store.directory(), step, commit));
      for (std::size_t i = 0; i < manifest->shards.size(); ++i)
        named.insert(shard_path(store.directory(), *manifest, i));
    }
    std::set<std::string> found;
    for (const std::string& path : everything()) {
      if (path.ends_with('/') || path == "run/lock" || path == "run/trunkline-checkpoints.json") continue;
      if (path.ends_with("/home")) continue;
      found.insert(root_.file(path));
    }
    EXPECT_EQ(found, named);
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root_.path())) {
      if (entry.is_directory() && step_of(entry.path().filename().string())) {
        EXPECT_FALSE(std::filesystem::is_empty(entry.path())) << entry.path();
      }
    }
  }
};

TEST_F(StoreCrashTest, ASaveMayStopBeforeAnyOfItsChanges) {
  constexpr std::size_t kEnough = 1000;
  std::size_t stops = 0;
  for (std::size_t allowed = 0; allowed < kEnough; ++allowed) {
    clear();
    {
      CrashPoint none;
      const auto store = open_with(none);
      save(*store, 1, {}, 300);
      save(*store, 2, {}, 300);
    }
    CrashPoint crash{.allowed = allowed};
    const auto outcome = try_save(*open_with(crash), 2, 1);
    const auto store = open();
    auto found = commits_that_are_there(*store);
    ASSERT_TRUE(found.contains(2)) << "a step that is saved again is lost after " << allowed << " changes";
    EXPECT_TRUE(!outcome.committed || found[2] == 3) << allowed;
    EXPECT_TRUE(found[2] == 2 || found[2] == 3);
    EXPECT_TRUE(found[2] == 3 || found.contains(1)) << "the older went before the new one was there";
    EXPECT_EQ(store->latest(), 2U);
    expect_no_debris(*store);
    EXPECT_EQ(commits_that_are_there(*store), found) << "collection changed what there is";
    if (outcome.finished) {
      EXPECT_EQ(found, (std::map<std::uint64_t, std::uint64_t>{{2, 3}}));
      break;
    }
    ++stops;
  }
  EXPECT_GT(stops, 20U);
  EXPECT_LT(stops, kEnough - 1);
}

TEST_F(StoreCrashTest, CollectionMayStopBeforeAnyOfItsChanges) {
  for (std::size_t allowed = 0;; ++allowed) {
    clear();
    {
      CrashPoint none;
      const auto store = open_with(none);
      save(*store, 1, {}, 300);
      auto transaction = begin(*store, 1);
      ASSERT_TRUE(transaction->commit(write_shards(*transaction, 300))) << "replaced, and not removed";
      transaction.reset();
      transaction = begin(*store, 2);
      write_shards(*transaction, 300);
    }
    CrashPoint crash{.allowed = allowed};
    const auto collected = open_with(crash)->collect();
    const auto store = open();
    EXPECT_EQ(commits_that_are_there(*store), (std::map<std::uint64_t, std::uint64_t>{{1, 2}}));
    expect_no_debris(*store);
    if (collected && collected->problems.empty()) break;
    ASSERT_LT(allowed, 1000U);
  }
}

TEST_F(StoreCrashTest, TheFirstSaveMayStopBeforeAnyOfItsChanges) {
  std::size_t stops = 0;
  for (std::size_t allowed = 0;; ++allowed) {
    clear();
    CrashPoint crash{.allowed = allowed};
    const bool committed = try_save(*open_with(crash), 1, {}).committed;
    const auto store = open({.volumes = volumes()});
    ASSERT_NE(store, nullptr);
    const auto found = commits_that_are_there(*store);
    EXPECT_TRUE(!committed || found == (std::map<std::uint64_t, std::uint64_t>{{1, 1}}));
    save(*store, 2);
    EXPECT_TRUE(is_whole(*store, *store->read_manifest(2)));
    expect_no_debris(*store);
    if (committed) break;
    ++stops;
    ASSERT_LT(allowed, 1000U);
  }
  EXPECT_GT(stops, 10U) << "directories, descriptor, homes, shards, manifest";
}

// What a power failure keeps is what was made durable: of changes without fsync any may be lost.
TEST_F(StoreCrashTest, WhatMustBeDurableFirstIs) {
  CrashPoint record;
  {
    const auto store = open_with(record);
    ASSERT_TRUE(try_save(*store, 1, {}).finished);
    ASSERT_TRUE(try_save(*store, 1, {}).finished);
    ASSERT_TRUE(try_save(*store, 2, 1).finished);
  }
  const auto parent = [](const std::string& path) {
    return std::filesystem::path(path).parent_path().string();
  };
  const auto name = [](const std::string& path) { return std::filesystem::path(path).filename().string(); };
  std::set<std::string> unsynced;             // directories with names that may still be lost
  std::set<std::string> removed_manifests;    // directories in which one was removed, without fsync since
  std::set<std::string> synced_since_commit;  // directories that were synced since the last manifest
  std::size_t manifests = 0;
  std::size_t shards = 0;
  for (const auto& [kind, path] : record.passed) {
    if (kind == Kind::make_directory) unsynced.insert(parent(path));
    if (kind == Kind::sync_directory) {
      unsynced.erase(path);
      removed_manifests.erase(path);
      synced_since_commit.insert(path);
    }
    if (kind == Kind::write_file) {
      EXPECT_TRUE(unsynced.empty()) << path << " is written in a directory that may be lost";
      if (!commit_of(name(path))) continue;
      ++manifests;
      std::size_t of_step = 0;
      for (const std::string& each : synced_since_commit) of_step += name(each) == name(parent(path)) ? 1 : 0;
      EXPECT_EQ(of_step, 3U) << "shards on two volumes, whose names come before that of their manifest";
      synced_since_commit.clear();
    }
    if (kind != Kind::remove_file) continue;
    if (commit_of(name(path))) {
      EXPECT_TRUE(commit_of(name(path)) != 1U || synced_since_commit.contains(parent(path)))
          << "the manifest that replaces it may be lost";
      removed_manifests.insert(parent(path));
    } else {
      ++shards;
      EXPECT_TRUE(removed_manifests.empty()) << path << " goes before its manifest has gone for good";
    }
  }
  EXPECT_EQ(manifests, 3U);
  EXPECT_EQ(shards, 4U);
}

// The manifest has its name, and the fsync of its directory fails: the checkpoint may be there after a power
// failure or not. The save fails, and saving again replaces it.
TEST_F(StoreCrashTest, ASaveWhoseNameMayNotBeDurableIsSavedAgain) {
  for (const bool there_before : {false, true}) {
    for (const bool name_is_lost : {false, true}) {
      clear();
      bool fails = false;
      const auto watch = [&](Kind kind, const std::string& path) -> Status {
        if (!fails || kind != Kind::sync_name) return {};
        fails = false;
        return std::unexpected(system_error(EIO, "fsync the directory", path));
      };
      const auto opened = Store::open(directory(), {.volumes = volumes(), .watch = watch});
      ASSERT_TRUE(opened);
      Store& store = **opened;
      save(store, 1, {}, 300);
      if (there_before) save(store, 2, {}, 300);
      const std::uint64_t number = there_before ? 3 : 2;

      const auto transaction = begin(store, 2);
      const Manifest manifest = write_shards(*transaction, 400);
      fails = true;
      const auto committed = transaction->commit(manifest);
      ASSERT_FALSE(committed);
      EXPECT_EQ(committed.error().code, EIO);
      EXPECT_FALSE(fails) << "it was not injected";
      if (name_is_lost) std::filesystem::remove(manifest_path(directory(), 2, number));
      const auto abandoned = transaction->abandon();
      ASSERT_TRUE(abandoned) << abandoned.error().message;
      EXPECT_TRUE(abandoned->problems.empty());
      // What is there is whole, whether it survives or not.
      const auto found = commits_that_are_there(store);
      EXPECT_EQ(found.contains(2), there_before || !name_is_lost);
      if (!name_is_lost) {
        EXPECT_EQ(found.at(2), number);
      }
      if (there_before) {
        EXPECT_TRUE(std::filesystem::exists(manifest_path(directory(), 2, 2)))
            << "all that a power failure may leave";
      }

      const auto next = begin(store, 2);
      const auto again = next->commit(write_shards(*next, 500));
      ASSERT_TRUE(again) << again.error().message;
      EXPECT_EQ(*again, number + 1);
      ASSERT_TRUE(next->retain(2));
      next->release();
      EXPECT_EQ(store.latest(), 2U);
      EXPECT_EQ(commits_that_are_there(store), (std::map<std::uint64_t, std::uint64_t>{{1, 1}, {2, *again}}));
      EXPECT_EQ(open()->read_manifest(2)->shards.front().bytes, 500U);
      expect_no_debris(store);
      // It goes on from there, also where it saves a later step instead.
      save(store, 3, 1);
      EXPECT_EQ(store.steps(), Steps{3});
      expect_no_debris(store);
    }
  }
}

// The same, and the run goes on with the next step: what may not be durable is one of its own.
TEST_F(StoreCrashTest, ASaveWhoseNameMayNotBeDurableIsFollowedByTheNext) {
  bool fails = false;
  const auto watch = [&](Kind kind, const std::string& path) -> Status {
    if (!fails || kind != Kind::sync_name) return {};
    fails = false;
    return std::unexpected(system_error(EIO, "fsync the directory", path));
  };
  const auto store = open({.volumes = volumes(), .watch = watch});
  const auto transaction = begin(*store, 5);
  const Manifest manifest = write_shards(*transaction);
  fails = true;
  ASSERT_FALSE(transaction->commit(manifest));
  ASSERT_TRUE(transaction->abandon());
  EXPECT_EQ(store->latest(), 5U);
  save(*store, 4);
  EXPECT_EQ(store->latest(), 4U);
  save(*store, 6, 1);
  EXPECT_EQ(store->steps(), Steps{6});
  expect_no_debris(*store);
}

// Random saves, rollbacks to older steps, collections and crashes, against a model: the order of commits.
TEST_F(StoreCrashTest, RandomHistoriesKeepWhatWasCommitted) {
  constexpr int kHistories = 6;
  constexpr int kActions = 20;
  for (int history = 0; history < kHistories; ++history) {
    clear();
    std::mt19937 random(static_cast<unsigned>(history));
    const auto below = [&random](unsigned limit) { return random() % limit; };
    std::vector<std::uint64_t> model;  // steps, in the order of their commits
    for (int action = 0; action < kActions; ++action) {
      const std::uint64_t step = below(5);
      const std::optional<std::uint64_t> keep = below(3) == 0 ? std::nullopt : std::optional(1 + below(3));
      CrashPoint crash;
      if (below(2) == 0) crash.allowed = below(45);
      const bool collects = below(4) == 0;
      bool committed = false;
      bool finished = false;
      if (const auto store = open_with(crash)) {
        if (collects) {
          EXPECT_TRUE(store->collect());
        } else {
          const auto outcome = try_save(*store, step, keep);
          committed = outcome.committed;
          finished = outcome.finished;
        }
      }
      const auto store = open();
      const auto there = commits_that_are_there(*store);
      std::vector<std::pair<std::uint64_t, std::uint64_t>> by_commit;
      for (const auto& [each, commit] : there) by_commit.emplace_back(commit, each);
      std::ranges::sort(by_commit);
      std::vector<std::uint64_t> found;
      for (const auto& [commit, each] : by_commit) found.push_back(each);
      const std::string where = fmt::format("history {} action {}", history, action);

      // Without the commit nothing has changed. With it (reported, or not reported since it was cut off
      // right behind the rename) the step is the last, and of the others some may be gone: those of later
      // steps first, then the oldest.
      std::vector<std::uint64_t> with = model;
      std::erase(with, step);
      with.push_back(step);
      const bool same = found == model;
      std::vector<std::uint64_t> removed;  // in this order, as many as are missing
      std::ranges::copy_if(with, std::back_inserter(removed), [step](auto each) { return each > step; });
      std::ranges::copy_if(with, std::back_inserter(removed), [step](auto each) { return each <= step; });
      removed.resize(with.size() - std::min(with.size(), found.size()));
      std::vector<std::uint64_t> left = with;
      std::erase_if(left,
                    [&](std::uint64_t each) { return std::ranges::find(removed, each) != removed.end(); });
      const bool is_left = found == left;
      if (collects) {
        EXPECT_TRUE(same) << where;
      } else {
        EXPECT_TRUE((same && !committed) || is_left) << where;
        if (committed) {
          EXPECT_EQ(store->latest(), step) << where;
          EXPECT_GE(found.size(), std::min<std::uint64_t>(with.size(), keep.value_or(with.size()))) << where;
        }
        if (finished && keep) {
          EXPECT_EQ(found.size(), std::min<std::uint64_t>(with.size(), *keep)) << where;
        }
      }
      ASSERT_FALSE(HasFailure()) << where;
      const std::optional<std::uint64_t> last = found.empty() ? std::nullopt : std::optional(found.back());
      EXPECT_EQ(store->latest().value(), last) << where;
      model = found;
    }
    const auto store = open();
    expect_no_debris(*store);
  }
}

// A step with a manifest that was replaced and not removed yet.
TEST_F(StoreCrashTest, ADeletionThatIsCutOffBringsNoReplacedManifestBack) {
  bool was_cut_off = false;
  for (std::size_t allowed = 0;; ++allowed) {
    for (const auto& entry : std::filesystem::directory_iterator(root_.path()))
      std::filesystem::remove_all(entry.path());
    {
      const auto store = open({.volumes = volumes()});
      save(*store, 1);
      const auto transaction = begin(*store, 1);
      ASSERT_TRUE(transaction->commit(write_shards(*transaction)));
    }
    test::CrashPoint crash{.allowed = allowed};
    if (open({.watch = crash.watch()})->remove(1)) break;
    was_cut_off = true;
    const auto store = open();
    if (store->steps() == std::vector<std::uint64_t>{}) continue;
    EXPECT_EQ(store->read_manifest(1)->commit, 2U) << "cut off after " << allowed << " changes";
  }
  EXPECT_TRUE(was_cut_off);
}

}  // namespace
}  // namespace trunkline::checkpoint
