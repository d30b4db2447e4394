// A directory, or its lock, that is replaced while a save goes on.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <string>

#include "checkpoint/names.h"
#include "checkpoint/store_fixture.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;
using Kind = Changes::Kind;
using Steps = std::vector<std::uint64_t>;

class ReplacedDirectoryTest : public test::StoreTest {
 protected:
  // As who moves it to a larger disk while it is used: cp -a, and the copy in its place.
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
    const Manifest manifest = write_shards(2, begin(*store, 2));
    swap_for_a_copy(is_volume ? volumes()[1] : directory());
    const auto committed = store->commit(manifest);
    ASSERT_FALSE(committed);
    EXPECT_EQ(committed.error().code, ESTALE) << committed.error().message;
    EXPECT_TRUE(store->abandon());
    EXPECT_EQ(open()->steps(), Steps{1});
    EXPECT_TRUE(is_whole(*open(), *open()->read_manifest(1)));
  }
}

TEST_F(ReplacedDirectoryTest, ASaveIntoADirectoryThatWasMovedAndLinkedGoesOn) {
  const auto store = open();
  save(*store, 1);
  const Manifest manifest = write_shards(2, begin(*store, 2));
  fs::rename(directory(), root_.file("moved"));
  fs::create_directory_symlink(root_.file("moved"), directory());
  EXPECT_TRUE(store->commit(manifest));
  EXPECT_TRUE(store->retain(1));
  EXPECT_EQ(open()->steps(), Steps{2});
}

// Removed as "stale": the next process then treats what is being written as debris.
TEST_F(ReplacedDirectoryTest, ASaveWhoseLockWasRemovedFails) {
  for (const bool made_anew : {false, true}) {
    const auto store = open();
    if (!store->latest()->has_value()) save(*store, 1);
    const Manifest manifest = write_shards(2, begin(*store, 2));
    fs::remove(lock_path());
    if (made_anew) {
      EXPECT_TRUE(open()->collect());
    }
    const auto committed = store->commit(manifest);
    ASSERT_FALSE(committed);
    EXPECT_EQ(committed.error().code, made_anew ? ESTALE : ENOENT) << committed.error().message;
    EXPECT_TRUE(store->abandon());
    EXPECT_EQ(open()->steps(), Steps{1});
  }
}

// At each change that the save makes: what it reports as saved is whole, whatever is collected meanwhile.
TEST_F(ReplacedDirectoryTest, WhatIsReportedAsSavedIsWholeWhereverTheLockIsRemoved) {
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
    const Manifest manifest = write_shards(2, begin(*store, 2));
    removes = true;
    const auto committed = store->commit(manifest);
    const auto retained = committed ? store->retain(1) : Result<SweepResult>(SweepResult{});
    removes = false;
    if (!committed) {
      ++failed;
      std::ignore = store->abandon();
    }
    store->release();
    const auto latest = open()->latest();
    ASSERT_TRUE(latest && *latest);
    EXPECT_EQ(**latest, committed ? 2U : 1U) << "at change " << at;
    EXPECT_TRUE(is_whole(*open(), *open()->read_manifest(**latest))) << "at change " << at;
    if (!is_removed) {
      EXPECT_TRUE(retained);
      break;
    }
  }
  EXPECT_GE(failed, 3);
}

}  // namespace
}  // namespace trunkline::checkpoint
