// Steps and manifests that users rename, copy and move by hand, while their shards are on volumes: nothing
// that a manifest below the directory names is removed.
#include <gtest/gtest.h>

#include "checkpoint/names.h"
#include "checkpoint/shard_references.h"
#include "checkpoint/store_fixture.h"
#include "checkpoint/volume_owner.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

using Steps = std::vector<std::uint64_t>;

class MovedStepsTest : public test::StoreTest {
 protected:
  void SetUp() override {
    const auto store = open({.volumes = volumes()});
    save(*store, 1);
    save(*store, 2);
    first_ = *store->read_manifest(1);
  }

  std::string step(std::uint64_t number) const { return directory() + "/" + step_directory(number); }

  std::string volume(std::size_t index) const { return open()->descriptor().volumes.at(index); }

  // Whether the first step's shards are as they were saved, wherever its manifest is now.
  bool is_first_whole() const { return is_whole(*open(), first_); }

  // Continues training in the directory, including saving the same step again.
  void train_on() const {
    const auto store = open();
    load(*store);
    save(*store, 3, 2);
    const auto collected = store->collect();
    ASSERT_TRUE(collected) << collected.error().message;
    for (const std::uint64_t number : {4, 1, 5, 6, 7}) save(*store, number, 2);
    ASSERT_TRUE(store->collect());
    EXPECT_EQ(store->steps(), (Steps{6, 7}));
  }

  Manifest first_;
};

// The step is moved out and then, during a collection that listed the steps without it, back in.
TEST_F(MovedStepsTest, AStepMovedBackDuringACollectionKeepsItsShards) {
  const std::string out = root_.file("out");
  fs::rename(step(1), out);
  const std::string debris = step(2) + "/shard-00009-of-00010-0123456789abcdef.safetensors";
  std::ofstream(debris) << "debris";
  const DirectoryOps ops([&](DirectoryOps::Kind, const std::string& path) -> Status {
    if (path == debris && fs::exists(out)) fs::rename(out, step(1));
    return {};
  });
  GarbageCollector collector(directory(), open()->descriptor(), ops, GarbageCollector::DryRun::no);
  collector.clean_all();
  ASSERT_TRUE(fs::exists(step(1))) << "the debris should be removed after the steps were listed";
  EXPECT_TRUE(is_first_whole());
}

// Its shards are in its directory, and on a volume it has an empty one. It is moved back at the last moment.
TEST_F(MovedStepsTest, AStepMovedBackWhileItsVolumesAreCleanedKeepsItsShards) {
  const std::string elsewhere = root_.file("without_volumes");
  const auto store = Store::open(elsewhere);
  ASSERT_TRUE(store);
  save(**store, 1);
  const Manifest saved = *(*store)->read_manifest(1);
  const std::string own = elsewhere + "/" + step_directory(1);
  const std::string out = root_.file("out");
  fs::rename(own, out);
  StoreDescriptor descriptor = (*store)->descriptor();
  descriptor.volumes.push_back(root_.file("late"));
  const std::string on_volume = descriptor.volumes.back() + "/" + step_directory(1);
  fs::create_directories(on_volume);
  ASSERT_TRUE(record_owner(descriptor.volumes.back(), elsewhere, DirectoryOps()));
  const DirectoryOps ops([&](DirectoryOps::Kind, const std::string& path) -> Status {
    if (path == on_volume && fs::exists(out)) fs::rename(out, own);
    return {};
  });
  GarbageCollector collector(elsewhere, descriptor, ops, GarbageCollector::DryRun::no);
  collector.clean_all();
  EXPECT_FALSE(fs::exists(on_volume));
  ASSERT_TRUE(fs::exists(own));
  EXPECT_TRUE(is_whole(**store, saved));
}

TEST_F(MovedStepsTest, ARenamedStepKeepsItsShards) {
  fs::rename(step(1), step(1) + ".best");
  EXPECT_TRUE(open()->collect()->problems.empty());
  train_on();
  EXPECT_TRUE(is_first_whole());
  fs::rename(step(1) + ".best", step(1));
  EXPECT_TRUE(is_whole(*open(), *open()->read_manifest(1)));
}

TEST_F(MovedStepsTest, AStepMovedBackFromARunThatWasSetAsideKeepsItsShards) {
  save(*open({.fresh = true}), 9);
  std::string aside;
  for (const auto& entry : fs::directory_iterator(directory())) {
    if (is_aside_directory(entry.path().filename().string())) aside = entry.path().string();
  }
  fs::rename(aside + "/" + step_directory(1), step(1));
  EXPECT_TRUE(is_first_whole());
  const Status removed = open()->remove(1);
  ASSERT_FALSE(removed);
  EXPECT_EQ(removed.error().kind, ErrorKind::unsupported);
  const std::string advice =
      fmt::format("{} holds steps that were moved out of {}, to which", directory(), aside);
  EXPECT_TRUE(removed.error().message.starts_with(advice)) << removed.error().message;
  EXPECT_TRUE(is_first_whole());
  const auto collected =
      (*Store::open(aside))->collect(GarbageCollector::DryRun::no, GarbageCollector::Orphans::remove);
  ASSERT_TRUE(collected) << collected.error().message;
  EXPECT_TRUE(is_first_whole());
  // Moved out entirely, no known manifest names them.
  fs::rename(step(1), root_.file("elsewhere"));
  ASSERT_TRUE(
      (*Store::open(aside))->collect(GarbageCollector::DryRun::no, GarbageCollector::Orphans::remove));
  EXPECT_FALSE(is_first_whole());
}

TEST_F(MovedStepsTest, AStepMovedBackFromARunThatWasSetAsideIsNotTheLatest) {
  save(*open(), 50);
  const auto store = open({.fresh = true});
  save(*store, 9);
  for (const auto& entry : fs::directory_iterator(directory())) {
    if (is_aside_directory(entry.path().filename().string()))
      fs::rename(entry.path() / step_directory(50), step(50));
  }
  EXPECT_EQ(store->steps(), (Steps{9, 50}));
  EXPECT_EQ(store->latest(), 9U);
}

TEST_F(MovedStepsTest, ACopyOfAStepKeepsItsShards) {
  fs::copy(step(1), directory() + "/best", fs::copy_options::recursive);
  fs::create_directory(directory() + "/keep");
  fs::copy(step(2), directory() + "/keep/step-00000002", fs::copy_options::recursive);
  const Manifest second = *open()->read_manifest(2);
  train_on();
  EXPECT_TRUE(is_first_whole());
  EXPECT_TRUE(is_whole(*open(), second));
  // Without the copies nothing names them, and they are left for the user to decide about.
  fs::remove_all(directory() + "/best");
  fs::remove_all(directory() + "/keep");
  const auto before = everything();
  const auto collected = open()->collect();
  EXPECT_EQ(collected->problems.size(), 2U);
  EXPECT_EQ(everything(), before);
  ASSERT_TRUE(open()->collect(GarbageCollector::DryRun::no, GarbageCollector::Orphans::remove));
  EXPECT_FALSE(is_first_whole());
  for (const std::string& path : everything())
    EXPECT_TRUE(path.find("step-00000001") == std::string::npos) << path;
}

TEST_F(MovedStepsTest, DeletingAStepKeepsTheShardsOfItsCopy) {
  fs::copy(step(1), directory() + "/best", fs::copy_options::recursive);
  ASSERT_TRUE(open()->remove(1));
  EXPECT_EQ(open()->steps(), Steps{2});
  EXPECT_TRUE(is_first_whole());
  EXPECT_TRUE(open()->collect()->problems.empty());
}

TEST_F(MovedStepsTest, AStepUnderAnotherStepsNumberKeepsItsShards) {
  fs::rename(step(1), step(101));
  EXPECT_EQ(open()->collect()->problems.size(), 1U) << "its manifest belongs to another step";
  EXPECT_TRUE(is_first_whole());
  fs::rename(step(101), directory() + "/step-1");
  train_on();
  EXPECT_TRUE(is_first_whole());
}

TEST_F(MovedStepsTest, AStepThatWasMovedAwayKeepsItsShardsUnlessToldOtherwise) {
  fs::rename(step(1), root_.file("archive"));
  const auto before = everything();
  for (const auto dry : {GarbageCollector::DryRun::yes, GarbageCollector::DryRun::no}) {
    const auto collected = open()->collect(dry);
    ASSERT_EQ(collected->problems.size(), 1U);
    EXPECT_EQ(collected->problems[0].kind, ErrorKind::unsupported);
    for (const std::string& part : {step(1), volume(0), std::string("gc --orphaned " + directory())})
      EXPECT_NE(collected->problems[0].message.find(part), std::string::npos);
    EXPECT_TRUE(collected->removed.empty());
  }
  EXPECT_EQ(everything(), before);
  train_on();
  EXPECT_TRUE(is_first_whole());
  fs::rename(root_.file("archive"), step(1));
  EXPECT_TRUE(open()->collect()->removed.empty());
  EXPECT_TRUE(is_whole(*open(), *open()->read_manifest(1)));
}

TEST_F(MovedStepsTest, OrphansAreRemovedWithTheirListOnRequest) {
  fs::rename(step(1), root_.file("archive"));
  train_on();
  const auto dry = open()->collect(GarbageCollector::DryRun::yes, GarbageCollector::Orphans::remove);
  const auto collected = open()->collect(GarbageCollector::DryRun::no, GarbageCollector::Orphans::remove);
  EXPECT_EQ(dry->bytes(), collected->bytes());
  EXPECT_GE(collected->bytes(), 4U * 5000);
  EXPECT_FALSE(is_first_whole());
  for (const std::string& path : everything())
    EXPECT_TRUE(path.starts_with("archive") || path.find("step-00000001") == std::string::npos) << path;
  EXPECT_TRUE(open()->collect()->problems.empty());
}

TEST_F(MovedStepsTest, ALinkToAStepElsewhereKeepsItsShards) {
  fs::rename(step(1), root_.file("archive"));
  fs::create_directory_symlink(root_.file("archive"), directory() + "/best");
  fs::create_directory_symlink(".", directory() + "/loop");
  EXPECT_TRUE(open()->collect()->problems.empty());
  ASSERT_TRUE(open()->collect(GarbageCollector::DryRun::no, GarbageCollector::Orphans::remove));
  EXPECT_TRUE(is_first_whole());
}

TEST_F(MovedStepsTest, ARenamedManifestKeepsTheShardsOfItsStep) {
  for (const bool on_volumes : {true, false}) {
    if (!on_volumes) {
      const auto store = open({.volumes = {{}}});
      load(*store);
      save(*store, 8);
    }
    const std::uint64_t number = on_volumes ? 1 : 8;
    const Manifest manifest = *open()->read_manifest(number);
    const std::string path = manifest_path(directory(), number, manifest.commit);
    fs::rename(path, path + ".bak");
    ASSERT_TRUE(open()->collect());
    EXPECT_TRUE(is_whole(*open(), manifest));
    fs::rename(path + ".bak", path);
  }
}

TEST_F(MovedStepsTest, AnUnreadableFileKeepsAllShardsOnVolumes) {
  if (::geteuid() == 0) GTEST_SKIP() << "root can read everything";
  fs::create_directory(directory() + "/private");
  fs::permissions(directory() + "/private", fs::perms(0));
  EXPECT_EQ(open()->remove(1).error().code, EACCES);
  EXPECT_EQ(open()->steps(), (Steps{1, 2}));
  EXPECT_TRUE(is_first_whole());
  fs::permissions(directory() + "/private", fs::perms(0700));
  EXPECT_TRUE(open()->remove(1));
}

// As if two disks were mounted in each other's place.
TEST_F(MovedStepsTest, ShardsOnTheWrongVolumeStay) {
  const std::string one = volume(0);
  const std::string two = volume(1);
  const auto swap = [&] {
    fs::rename(one, root_.file("x"));
    fs::rename(two, one);
    fs::rename(root_.file("x"), two);
  };
  const auto store = open();
  load(*store);
  swap();
  ASSERT_TRUE(store->collect());
  const auto transaction = begin(*store, 2);
  ASSERT_TRUE(transaction->commit(write_shards(*transaction))) << "a manifest is replaced meanwhile";
  const Manifest second = *store->read_manifest(2);
  ASSERT_TRUE(transaction->retain({}));
  transaction->release();
  EXPECT_TRUE(is_whole(*store, second));
  swap();
  EXPECT_TRUE(is_first_whole());
}

// A run that begins with a step of another run, to which it has a link: nothing behind the link is ever
// touched.
class LinkedStepTest : public test::StoreTest {
 protected:
  void SetUp() override {
    const auto store = Store::open(other_);
    ASSERT_TRUE(store);
    save(**store, 100);
    fs::create_directories(directory());
    fs::create_directory_symlink(other_ + "/" + step_directory(100), link_);
    std::ofstream(other_ + "/" + step_directory(100) + "/shard-00000-of-00001-0123456789abcdef.safetensors")
        << "that somebody writes";
    before_ = of_other();
  }

  std::vector<std::string> of_other() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::recursive_directory_iterator(other_)) found.push_back(entry.path().string());
    std::ranges::sort(found);
    return found;
  }

  std::string other_ = root_.file("other");
  std::string link_ = directory() + "/" + step_directory(100);
  std::vector<std::string> before_;
};

TEST_F(LinkedStepTest, RetentionRemovesTheLink) {
  const auto store = open();
  ASSERT_TRUE(store->collect());
  load(*store);
  save(*store, 101, 2);
  EXPECT_TRUE(fs::is_symlink(link_));
  save(*store, 102, 2);
  EXPECT_FALSE(fs::is_symlink(link_));
  EXPECT_EQ(store->steps(), (Steps{101, 102}));
  EXPECT_EQ(of_other(), before_);
}

TEST_F(LinkedStepTest, DeletingRemovesTheLink) {
  const auto store = open();
  const auto removed = store->remove(100);
  ASSERT_TRUE(removed) << removed.error().message;
  EXPECT_FALSE(fs::is_symlink(link_));
  EXPECT_EQ(of_other(), before_);
}

TEST_F(LinkedStepTest, SavingTheSameStepIsRejected) {
  const auto store = open();
  load(*store);
  const std::vector<std::uint64_t> one{1};
  for (const Error& error : {store->begin(100, one).error(), store->check_continues(100).error()}) {
    EXPECT_EQ(error.code, EEXIST);
    EXPECT_NE(error.message.find("symbolic link to " + other_), std::string::npos) << error.message;
  }
  EXPECT_EQ(of_other(), before_);
  save(*store, 101, 1);
  EXPECT_EQ(of_other(), before_);
}

TEST_F(MovedStepsTest, AVolumeUnmountedDuringRetentionIsCleanedLater) {
  const auto store = open();
  load(*store);
  const std::string gone = volume(1);
  fs::rename(gone, root_.file("unmounted"));
  ASSERT_TRUE(store->remove(1));
  EXPECT_EQ(store->steps(), Steps{2});
  fs::rename(root_.file("unmounted"), gone);
  const auto collected = store->collect();
  ASSERT_TRUE(collected);
  EXPECT_TRUE(collected->problems.empty());
  EXPECT_FALSE(fs::exists(gone + "/step-00000001"));
  EXPECT_FALSE(fs::exists(step(1)));
}

TEST_F(MovedStepsTest, AVolumeThatIsNoLongerUsedIsCleanedOnceItIsMountedAgain) {
  const std::string gone = volume(0);
  fs::rename(gone, root_.file("unmounted"));
  const auto store = open({.volumes = std::vector{volumes().at(1)}});
  load(*store);
  save(*store, 3);
  ASSERT_TRUE(store->remove(1));
  for (const GarbageCollector::DryRun dry_run :
       {GarbageCollector::DryRun::yes, GarbageCollector::DryRun::no}) {
    const auto collected = open()->collect(dry_run);
    ASSERT_TRUE(collected);
    ASSERT_EQ(collected->problems.size(), 1U);
    EXPECT_EQ(collected->problems.front().path, gone);
  }
  ASSERT_TRUE(open()->collect_if_used());
  EXPECT_TRUE(fs::exists(step(1))) << "it reports that shards are left";
  fs::rename(root_.file("unmounted"), gone);
  const auto collected = open()->collect();
  ASSERT_TRUE(collected);
  EXPECT_TRUE(collected->problems.empty());
  EXPECT_FALSE(fs::exists(gone + "/step-00000001"));
  EXPECT_FALSE(fs::exists(step(1)));
}

TEST(ShardReferences, AreFoundInAnyText) {
  const std::string nonce = random_hex(16);
  const std::string one = shard_file(0, 2, nonce);
  const std::string two = shard_file(1, 2, nonce);
  std::set<std::string> names;
  add_shard_names("shard-" + one + "\"shard-shard-" + two + "shard-00000-of-", names);
  EXPECT_EQ(names, (std::set<std::string>{one, two}));
}

// The run continued with other volumes: its previous ones are former volumes.
TEST_F(MovedStepsTest, ShardsOnFormerVolumesStayWhereTheStepIsSavedAgain) {
  fs::rename(step(1), root_.file("out"));
  const auto store = open({.volumes = {{root_.file("v9")}}});
  load(*store);
  for (const std::uint64_t number : {2, 1, 5, 6, 7}) save(*store, number, 1);
  fs::remove_all(step(1));
  fs::rename(root_.file("out"), step(1));
  EXPECT_TRUE(is_whole(*store, first_));
}

TEST_F(MovedStepsTest, AStepThatIsMovedBackWhileOrphansAreRemovedStays) {
  const std::string out = root_.file("out");
  fs::rename(step(1), out);
  const std::string debris = step(2) + "/shard-00009-of-00010-0123456789abcdef.safetensors";
  std::ofstream(debris) << "debris";
  bool is_moved_back = false;
  const DirectoryOps ops([&](DirectoryOps::Kind, const std::string& path) -> Status {
    if (path == debris && !is_moved_back) {
      is_moved_back = true;
      fs::rename(out, step(1));
    }
    return {};
  });
  GarbageCollector collector(directory(), open()->descriptor(), ops, GarbageCollector::DryRun::no,
                             GarbageCollector::Orphans::remove);
  collector.clean_all();
  EXPECT_TRUE(is_moved_back);
  EXPECT_TRUE(is_first_whole());
}

}  // namespace
}  // namespace trunkline::checkpoint
