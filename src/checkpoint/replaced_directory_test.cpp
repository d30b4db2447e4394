// A directory, or its lock, that is replaced during a save.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <string>

#include "checkpoint/names.h"
#include "checkpoint/store_fixture.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;
using Kind = DirectoryOps::Kind;
using Steps = std::vector<std::uint64_t>;

class ReplacedDirectoryTest : public test::StoreTest {
 protected:
  // Like a user who moves it to a larger disk while it is in use: cp -a, and the copy in its place.
  void swap_for_a_copy(const std::string& path) const {
    fs::copy(path, root_.file("copy"), fs::copy_options::recursive);
    fs::rename(path, root_.file("original"));
    fs::rename(root_.file("copy"), path);
  }

  std::string lock_path() const { return fmt::format("{}/{}", directory(), kLockFile); }
};

TEST_F(ReplacedDirectoryTest, ASaveIntoADirectoryThatWasReplacedFails) {
  for (const bool is_volume : {false, true}) {
    for (const auto& entry : fs::directory_iterator(root_.path())) fs::remove_all(entry.path());
    const auto store = open({.volumes = volumes()});
    save(*store, 1);
    const auto transaction = begin(*store, 2);
    const Manifest manifest = write_shards(*transaction);
    swap_for_a_copy(is_volume ? volumes()[1] : directory());
    const auto committed = transaction->commit(manifest);
    ASSERT_FALSE(committed);
    EXPECT_EQ(committed.error().code, ESTALE) << committed.error().message;
    EXPECT_TRUE(transaction->abandon());
    EXPECT_EQ(open()->steps(), Steps{1});
    EXPECT_TRUE(is_whole(*open(), *open()->read_manifest(1)));
  }
}

TEST_F(ReplacedDirectoryTest, ASaveIntoADirectoryThatWasMovedAndLinkedContinues) {
  const auto store = open();
  save(*store, 1);
  const auto transaction = begin(*store, 2);
  const Manifest manifest = write_shards(*transaction);
  fs::rename(directory(), root_.file("moved"));
  fs::create_directory_symlink(root_.file("moved"), directory());
  EXPECT_TRUE(transaction->commit(manifest));
  EXPECT_TRUE(transaction->retain(1));
  EXPECT_EQ(open()->steps(), Steps{2});
}

// Someone removes "a stale lock": the next process would then take what is being written for debris.
TEST_F(ReplacedDirectoryTest, ASaveWhoseLockWasRecreatedFails) {
  const auto store = open();
  save(*store, 1);
  const auto transaction = begin(*store, 2);
  const Manifest manifest = write_shards(*transaction);
  fs::remove(lock_path());
  EXPECT_TRUE(open()->collect());
  const auto committed = transaction->commit(manifest);
  ASSERT_FALSE(committed);
  EXPECT_EQ(committed.error().code, ESTALE) << committed.error().message;
  EXPECT_TRUE(transaction->abandon());
  EXPECT_EQ(open()->steps(), Steps{1});
}

// For example after a purge of old files.
TEST_F(ReplacedDirectoryTest, AMissingLockIsCreatedAgain) {
  const auto store = open();
  const auto transaction = begin(*store, 2);
  const Manifest manifest = write_shards(*transaction);
  fs::remove(lock_path());
  EXPECT_TRUE(transaction->commit(manifest));
  EXPECT_TRUE(open()->collect()->is_busy) << "it should be locked again";
  transaction->release();
  EXPECT_FALSE(open()->collect()->is_busy);
}

TEST_F(ReplacedDirectoryTest, ALiveRunKeepsItsLockAndItsRecordsFresh) {
  save(*open({.volumes = volumes()}), 1);
  const std::string record = fmt::format("{}/{}", open()->descriptor().volumes[0], kOwnerFile);
  const auto old = fs::file_time_type::clock::now() - std::chrono::hours(1000);
  const std::vector<std::string> kept = {lock_path(), record,
                                         fmt::format("{}/{}", directory(), kDescriptorFile)};
  for (const std::string& path : kept) fs::last_write_time(path, old);
  load_and_save(*open(), 2);
  for (const std::string& path : kept) EXPECT_GT(fs::last_write_time(path), old) << path;
}

// Copies of steps have no lock, and hard-linked copies have the same one: neither shows which directory it
// is.
TEST_F(ReplacedDirectoryTest, ADirectoryWithoutALockIsNotMistakenForTheLockedOne) {
  const auto replace_at = [&](Kind moment) {
    return [this, moment, done = false](Kind kind, const std::string&) mutable -> Status {
      if (kind != moment || done) return {};
      done = true;
      fs::remove(directory());
      fs::create_directory_symlink(root_.file("backup"), directory());
      return {};
    };
  };
  for (const Kind moment : {Kind::make_directory, Kind::sync_directory, Kind::write_file}) {
    for (const std::string& each : {directory(), root_.file("a"), root_.file("backup")}) fs::remove_all(each);
    for (const std::uint64_t step : {1, 2}) load_and_save(*open(), step);
    fs::copy(directory(), root_.file("backup"), fs::copy_options::recursive);
    fs::remove(fmt::format("{}/{}", root_.file("backup"), kLockFile));
    fs::rename(directory(), root_.file("a"));
    fs::create_directory_symlink(root_.file("a"), directory());
    const auto store = open({.watch = replace_at(moment)});
    load(*store);
    const auto transaction = store->begin(3, std::vector<std::uint64_t>{2});
    if (transaction) {
      EXPECT_FALSE((*transaction)->commit(write_shards(**transaction)));
      EXPECT_TRUE((*transaction)->abandon());
    }
    EXPECT_EQ(open()->steps(), (Steps{1, 2}));
    for (const std::uint64_t step : {1, 2}) EXPECT_TRUE(is_whole(*open(), *open()->read_manifest(step)));
  }
}

TEST_F(ReplacedDirectoryTest, ADeletionStopsWhereTheDirectoryIsReplacedByOneWithoutALock) {
  for (const std::uint64_t step : {1, 2}) load_and_save(*open(), step);
  fs::copy(directory(), root_.file("backup"), fs::copy_options::recursive);
  fs::remove(fmt::format("{}/{}", root_.file("backup"), kLockFile));
  fs::rename(directory(), root_.file("a"));
  fs::create_directory_symlink(root_.file("a"), directory());
  bool done = false;
  const auto store = open({.watch = [&](Kind kind, const std::string&) -> Status {
    if (kind != Kind::sync_directory || done) return {};
    done = true;
    fs::remove(directory());
    fs::create_directory_symlink(root_.file("backup"), directory());
    return {};
  }});
  EXPECT_FALSE(store->remove(2));
  EXPECT_TRUE(done);
  EXPECT_EQ(open()->steps(), (Steps{1, 2})) << "the backup's steps";
  for (const std::uint64_t step : {1, 2}) EXPECT_TRUE(is_whole(*open(), *open()->read_manifest(step)));
}

// As if disks were mounted in each other's place, after the record of the volume's owner was read.
TEST_F(ReplacedDirectoryTest, RemovingStopsWhereAVolumeIsReplaced) {
  for (const bool is_deletion : {false, true}) {
    for (const auto& entry : fs::directory_iterator(root_.path())) fs::remove_all(entry.path());
    bool is_armed = false;
    const auto store = open({.volumes = volumes(), .watch = [&](Kind kind, const std::string&) -> Status {
                               if (!is_armed || kind != Kind::remove_file) return {};
                               is_armed = false;
                               swap_for_a_copy(volumes()[0]);
                               return {};
                             }});
    save(*store, 1);
    const auto transaction = begin(*store, 2);
    std::ignore = write_shards(*transaction);
    transaction->release();
    is_armed = true;
    if (is_deletion) {
      const auto removed = store->remove(1);
      ASSERT_FALSE(removed);
      EXPECT_EQ(removed.error().code, ESTALE) << removed.error().message;
    } else {
      const auto collected = store->collect();
      ASSERT_TRUE(collected);
      ASSERT_FALSE(collected->problems.empty());
      EXPECT_EQ(collected->problems.front().code, ESTALE) << collected->problems.front().message;
    }
    ASSERT_FALSE(is_armed);
    const std::string volume = open()->descriptor().volumes[0];
    for (const std::uint64_t step : {1, 2}) {
      EXPECT_TRUE(fs::exists(fmt::format("{}/{}", volume, step_directory(step)))) << "step " << step;
    }
  }
}

// Covers what the first save of a run creates and moves before it writes anything.
TEST_F(ReplacedDirectoryTest, SettingARunAsideStopsWhereTheDirectoryIsReplaced) {
  for (const Kind moment : {Kind::make_directory, Kind::write_file, Kind::rename}) {
    for (const auto& entry : fs::directory_iterator(root_.path())) fs::remove_all(entry.path());
    for (const std::uint64_t step : {1, 2, 3}) load_and_save(*open(), step);
    int changes = 0;
    const auto store = open({.fresh = true, .watch = [&](Kind kind, const std::string&) -> Status {
                               if (kind == moment && ++changes == 1) swap_for_a_copy(directory());
                               return {};
                             }});
    const auto begun = store->begin(1, std::vector<std::uint64_t>{1});
    ASSERT_FALSE(begun);
    EXPECT_EQ(begun.error().code, ESTALE) << begun.error().message;
    // The first change was allowed: at the time of the check, it was still the original directory.
    const std::size_t least = moment == Kind::rename ? 2 : 3;
    EXPECT_GE(open()->steps()->size(), least);
  }
}

TEST_F(ReplacedDirectoryTest, RetentionStopsWhereAFormerVolumeIsReplaced) {
  {
    const auto store = open({.volumes = volumes()});
    for (const std::uint64_t step : {1, 2}) save(*store, step);
  }
  bool is_armed = false;
  const auto store =
      open({.volumes = {{root_.file("v2")}}, .watch = [&](Kind kind, const std::string&) -> Status {
              if (!is_armed || kind != Kind::remove_file) return {};
              is_armed = false;
              swap_for_a_copy(volumes()[0]);
              return {};
            }});
  load(*store);
  const auto transaction = begin(*store, 3);
  ASSERT_TRUE(transaction->commit(write_shards(*transaction)));
  is_armed = true;
  const auto collected = transaction->retain(1);
  ASSERT_TRUE(collected);
  EXPECT_FALSE(is_armed);
  EXPECT_FALSE(collected->problems.empty());
  const std::string former = store->descriptor().former_volumes.at(0);
  for (const std::uint64_t step : {1, 2})
    EXPECT_TRUE(fs::exists(fmt::format("{}/{}", former, step_directory(step)))) << "step " << step;
}

TEST_F(ReplacedDirectoryTest, SettingARunAsideStopsWhereAVolumeIsReplaced) {
  {
    const auto store = open({.volumes = volumes()});
    for (const std::uint64_t step : {1, 2}) save(*store, step);
  }
  bool is_armed = true;
  const auto store = open({.fresh = true, .watch = [&](Kind kind, const std::string&) -> Status {
                             if (!is_armed || kind != Kind::rename) return {};
                             is_armed = false;
                             swap_for_a_copy(volumes()[0]);
                             return {};
                           }});
  EXPECT_FALSE(store->begin(1, std::vector<std::uint64_t>{1, 1}));
  EXPECT_FALSE(is_armed);
}

TEST_F(ReplacedDirectoryTest, DeletingInACopyRemovesNothingFromAVolumeWithoutARecord) {
  const auto store = open({.volumes = volumes()});
  for (const std::uint64_t step : {1, 2}) save(*store, step);
  const std::string copy = root_.file("copy");
  fs::copy(directory(), copy, fs::copy_options::recursive);
  for (const std::string& volume : store->descriptor().volumes)
    fs::remove(volume + "/" + std::string(kOwnerFile));
  const auto other = Store::open(copy);
  ASSERT_TRUE(other);
  EXPECT_FALSE((*other)->remove(1));
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(1)));
  EXPECT_EQ((*other)->steps(), (Steps{1, 2})) << "the copy's manifest stays too";
}

// A purge removed the record of the volume's owner: a copy that is opened must not take the volume over.
TEST_F(ReplacedDirectoryTest, OpeningACopyRemovesNothingFromAVolumeWithoutARecord) {
  const auto store = open({.volumes = volumes()});
  save(*store, 1);
  const std::string copy = root_.file("copy");
  fs::copy(directory(), copy, fs::copy_options::recursive);
  save(*store, 1);
  for (const std::string& volume : store->descriptor().volumes)
    fs::remove(volume + "/" + std::string(kOwnerFile));
  const auto other = Store::open(copy);
  ASSERT_TRUE(other);
  EXPECT_TRUE((*other)->collect_if_used());
  EXPECT_FALSE((*other)->collect()->problems.empty());
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(1)));
  save(*store, 2);
  EXPECT_TRUE(open()->collect()->problems.empty()) << "the owner is recorded again";
}

TEST_F(ReplacedDirectoryTest, RetentionStopsWhereTheDirectoryIsReplaced) {
  for (std::uint64_t step = 1; step <= 5; ++step) load_and_save(*open(), step);
  fs::copy(directory(), root_.file("backup"), fs::copy_options::recursive);
  fs::rename(directory(), root_.file("a"));
  fs::create_directory_symlink(root_.file("a"), directory());
  int removals = 0;
  const auto store = open({.watch = [&](Kind kind, const std::string&) -> Status {
    if (kind == Kind::remove_directory && ++removals == 1) {
      fs::remove(directory());
      fs::create_directory_symlink(root_.file("backup"), directory());
    }
    return {};
  }});
  load(*store);
  const auto transaction = begin(*store, 6);
  ASSERT_TRUE(transaction->commit(write_shards(*transaction)));
  const auto collected = transaction->retain(1);
  ASSERT_TRUE(collected);
  EXPECT_FALSE(collected->problems.empty());
  EXPECT_EQ(open()->steps(), (Steps{1, 2, 3, 4, 5})) << "the backup's steps";
}

TEST_F(ReplacedDirectoryTest, AStepThatIsMovedBackIsOlderThanWhatWasSavedMeanwhile) {
  const auto store = open();
  for (const std::uint64_t step : {100, 110}) save(*store, step);
  const std::string moved = fmt::format("{}/{}", directory(), step_directory(110));
  fs::rename(moved, root_.file("archive"));
  save(*store, 120);
  fs::rename(root_.file("archive"), moved);
  EXPECT_EQ(store->latest(), 120U);
}

// At each change that the save makes: what it reports as saved is complete, whatever is collected meanwhile.
TEST_F(ReplacedDirectoryTest, ReportedSavesAreCompleteWhereverTheLockIsRemoved) {
  int failed = 0;
  for (std::uint64_t at = 0;; ++at) {
    for (const auto& entry : fs::directory_iterator(root_.path())) fs::remove_all(entry.path());
    std::uint64_t changes = 0;
    bool is_removed = false;
    bool removes = false;
    const auto store = open({.watch = [&](Kind, const std::string&) -> Status {
      if (removes && changes++ == at) {
        is_removed = true;
        fs::remove(lock_path());
        EXPECT_TRUE(open()->collect());
      }
      return {};
    }});
    save(*store, 1);
    const auto transaction = begin(*store, 2);
    const Manifest manifest = write_shards(*transaction);
    removes = true;
    const auto committed = transaction->commit(manifest);
    const auto retained = committed ? transaction->retain(1) : Result<CollectionResult>(CollectionResult{});
    removes = false;
    if (!committed) {
      ++failed;
      std::ignore = transaction->abandon();
    }
    transaction->release();
    const auto latest = open()->latest();
    ASSERT_TRUE(latest);
    EXPECT_EQ(*latest, committed ? 2U : 1U) << "at change " << at;
    EXPECT_TRUE(is_whole(*open(), *open()->read_manifest(latest->value_or(0)))) << "at change " << at;
    if (!is_removed) {
      EXPECT_TRUE(retained);
      break;
    }
  }
  EXPECT_GE(failed, 3);
}

}  // namespace
}  // namespace trunkline::checkpoint
