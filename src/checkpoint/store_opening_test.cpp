// What opening a directory of checkpoints does (nothing), what it refuses, and what the first save makes.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "checkpoint/names.h"
#include "checkpoint/store_fixture.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

using Steps = std::vector<std::uint64_t>;
using Paths = std::vector<std::string>;

class StoreOpeningTest : public test::StoreTest {
 protected:
  void write(const std::string& name) const { std::ofstream(root_.file(name)) << "x"; }
};

TEST_F(StoreOpeningTest, OpeningAndReadingCreateNothing) {
  const auto store = Store::open(root_.file("a/b/run"), {.volumes = volumes()});
  ASSERT_TRUE(store) << store.error().message;
  EXPECT_EQ((*store)->steps(), Steps{});
  EXPECT_EQ((*store)->latest(), std::nullopt);
  const auto missing = (*store)->read_manifest(1);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ENOENT);
  EXPECT_NE(missing.error().message.find("does not exist"), std::string::npos) << missing.error().message;
  for (const auto& collected :
       {(*store)->collect(), (*store)->collect(GarbageCollector::DryRun::yes), (*store)->collect_if_used()}) {
    ASSERT_TRUE(collected) << collected.error().message;
    EXPECT_FALSE(collected->is_busy);
  }
  EXPECT_EQ(everything(), Paths{});
  fs::create_directory(directory());
  const auto empty = open();
  EXPECT_TRUE(empty->collect());
  EXPECT_EQ(everything(), Paths{"run/"});
}

TEST_F(StoreOpeningTest, TheFirstSaveMakesWhatIsMissing) {
  const auto store = open({.volumes = volumes()});
  const StoreDescriptor planned = store->descriptor();
  save(*store, 1);
  EXPECT_EQ(store->descriptor(), planned);
  EXPECT_EQ(open()->descriptor(), planned);
  EXPECT_EQ(open({.if_missing = IfMissing::fail})->descriptor(), planned);
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(1)));
}

TEST_F(StoreOpeningTest, ParentsOfLinksAreThoseOfTheKernel) {
  fs::create_directories(root_.file("disk/deep"));
  fs::create_directory_symlink(root_.file("disk/deep"), root_.file("link"));
  const auto store = Store::open(root_.file("link/../run"));
  ASSERT_TRUE(store) << store.error().message;
  save(**store, 1);
  EXPECT_TRUE(fs::exists(root_.file("disk/run/step-00000001")));
  EXPECT_FALSE(fs::exists(root_.file("run")));
}

TEST_F(StoreOpeningTest, TwoThatOpenOneNewDirectoryAgreeOnItsDescriptor) {
  const auto one = open({.volumes = volumes()});
  const auto other = open({.volumes = volumes()});
  EXPECT_NE(one->descriptor().id, other->descriptor().id);
  save(*one, 1);
  save(*other, 2);
  EXPECT_EQ(other->descriptor(), one->descriptor());
  for (const std::uint64_t step : {1, 2}) EXPECT_TRUE(is_whole(*one, *one->read_manifest(step)));
  std::size_t on_volumes = 0;
  for (const auto& entry : fs::directory_iterator(volumes()[0])) on_volumes += entry.is_directory() ? 1 : 0;
  EXPECT_EQ(on_volumes, 1U);
}

TEST_F(StoreOpeningTest, VolumesWithinTheDirectoryAreRefused) {
  for (const char* name : {"real", "run"}) fs::create_directory(root_.file(name));
  fs::create_directory_symlink(root_.file("real"), root_.file("link"));
  fs::create_directory_symlink(root_.file("run"), root_.file("same"));
  for (const char* volume : {"run", "run/", "run/a/b", "same", "same/a"}) {
    const auto refused = Store::open(directory(), {.volumes = {{root_.file(volume)}}});
    ASSERT_FALSE(refused) << volume;
    EXPECT_EQ(refused.error().kind, ErrorKind::invalid_argument);
    EXPECT_EQ(refused.error().message.find("volumes: "), 0U) << refused.error().message;
  }
  for (const char* volume : {"run-2", "link", "ru", ""})
    EXPECT_TRUE(Store::open(directory(), {.volumes = {{root_.file(volume)}}})) << volume;
}

TEST_F(StoreOpeningTest, VolumesThatAnotherChangedAreFollowed) {
  const auto store = open();
  save(*store, 1);
  save(*open({.volumes = volumes()}), 2);
  EXPECT_EQ(store->begin(3, Steps{1}).error().code, EAGAIN);
  EXPECT_EQ(store->descriptor().volumes.size(), 2U);
  save(*store, 3);
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(3)));
}

TEST_F(StoreOpeningTest, AForeignDirectoryIsRefusedAndLeftAlone) {
  fs::create_directory(directory());
  const auto opened_before = open();
  for (const char* name : {"run/report.txt", "run/model.bin", "run/notes", "run/zoo"}) write(name);
  const auto before = everything();
  const auto refused = Store::open(directory());
  ASSERT_FALSE(refused);
  for (const Error& error : {refused.error(), opened_before->begin(1, Steps{1}).error()}) {
    EXPECT_EQ(error.kind, ErrorKind::system);
    EXPECT_EQ(error.code, ENOTEMPTY);
    EXPECT_EQ(error.path, directory());
    for (const char* part : {"model.bin, notes, report.txt and 1 more", "run/checkpoints"})
      EXPECT_NE(error.message.find(part), std::string::npos) << error.message;
  }
  write("run/.trunkline-0123456789abcdef.tmp");
  EXPECT_TRUE(opened_before->collect()->removed.empty()) << "nothing there is this library's to remove";
  fs::remove(directory() + "/.trunkline-0123456789abcdef.tmp");
  EXPECT_EQ(everything(), before);
  EXPECT_EQ(Store::open(directory(), {.if_missing = IfMissing::fail}).error().code, ENOENT);
}

TEST_F(StoreOpeningTest, StepsOfOthersAreLeftAlone) {
  const std::string theirs = directory() + "/" + step_directory(7);
  fs::create_directories(theirs);
  std::ofstream(theirs + "/dcp.manifest") << "{}";
  for (const IfMissing if_missing : {IfMissing::create, IfMissing::fail}) {
    const auto refused = Store::open(directory(), {.if_missing = if_missing});
    ASSERT_FALSE(refused);
    for (const char* part :
         {"step-00000007 is a checkpoint of torch.distributed", "trunkline.dcp.StorageReader"})
      EXPECT_NE(refused.error().message.find(part), std::string::npos) << refused.error().message;
  }
  fs::rename(theirs, root_.file("theirs"));
  save(*open(), 1);
  fs::rename(root_.file("theirs"), theirs);  // as an earlier version let them be mixed
  EXPECT_EQ(open()->begin(7, Steps{1}).error().code, EEXIST);
  EXPECT_EQ(open()->check_continues(7).error().code, EEXIST);
  const auto fresh_run = open({.fresh = true});
  EXPECT_EQ(fresh_run->check_continues(7).error().code, EEXIST);
  EXPECT_EQ(fresh_run->begin(7, Steps{1}).error().code, EEXIST);
  EXPECT_EQ(open()->steps(), Steps{1}) << "nothing moved";
  save(*open({.fresh = true}), 2);
  EXPECT_EQ(open()->steps(), Steps{2});
  EXPECT_TRUE(fs::exists(theirs + "/dcp.manifest"));
}

TEST_F(StoreOpeningTest, AnyFileOfDcpMakesAStepOneOfIts) {
  save(*open(), 1);
  for (const char* name : {"dcp.manifest", "dcp-rank00001.manifest", ".metadata", "__3.metadata",
                           "__0_1.distcp", "rank00000-0-0123456789abcdef0123456789abcdef.shard"}) {
    fs::create_directory(directory() + "/" + step_directory(2));
    write(fmt::format("run/{}/{}", step_directory(2), name));
    const auto refused = open()->begin(2, Steps{1});
    EXPECT_TRUE(!refused && refused.error().code == EEXIST) << name;
    fs::remove_all(directory() + "/" + step_directory(2));
  }
}

TEST_F(StoreOpeningTest, AnEmptyStepIsNobodys) {
  fs::create_directories(directory() + "/" + step_directory(3));
  EXPECT_TRUE(Store::open(directory())) << "alone it keeps nobody out";
  fs::create_directory(directory() + "/" + step_directory(1));
  write(fmt::format("run/{}/dcp.manifest", step_directory(1)));
  for (const IfMissing if_missing : {IfMissing::create, IfMissing::fail})
    EXPECT_FALSE(Store::open(directory(), {.if_missing = if_missing})) << "beside one of DCP";
  EXPECT_TRUE(fs::exists(directory() + "/" + step_directory(3)));
}

TEST_F(StoreOpeningTest, AMovedStepOnVolumesIsToMoveBack) {
  save(*open({.volumes = volumes()}), 12);
  fs::rename(directory() + "/" + step_directory(12), root_.file("best"));
  const auto refused = Store::open(root_.file("best"));
  ASSERT_FALSE(refused);
  for (const char* part : {"it is step 12", "shards are on volumes", "move it back there, as step-00000012"})
    EXPECT_NE(refused.error().message.find(part), std::string::npos) << refused.error().message;
}

TEST_F(StoreOpeningTest, ACopyOfAStepIsToldWhatToBeCalled) {
  save(*open(), 12);
  fs::copy(directory() + "/" + step_directory(12), root_.file("best"));
  const auto refused = Store::open(root_.file("best"));
  ASSERT_FALSE(refused);
  EXPECT_NE(
      refused.error().message.find("a copy of step 12; put it into a directory of its own, as step-00000012"),
      std::string::npos)
      << refused.error().message;
  const auto missing = Store::open(directory() + "/" + step_directory(12), {.if_missing = IfMissing::fail});
  EXPECT_NE(missing.error().message.find("it is step 12 of " + directory()), std::string::npos)
      << missing.error().message;
}

// Its shards would count as debris there: they have their manifests in the directory that they belong to.
TEST_F(StoreOpeningTest, ADirectoryOnAVolumeIsNoneOfCheckpoints) {
  const auto store = open({.volumes = volumes()});
  save(*store, 1);
  const std::string on_volume = store->descriptor().volumes.front();
  const std::string copy = root_.file("copy");
  fs::copy(on_volume, copy, fs::copy_options::recursive);
  const Paths before = everything();
  for (const std::string& each : {on_volume, copy}) {
    for (const IfMissing if_missing : {IfMissing::create, IfMissing::fail}) {
      const auto opened = Store::open(each, {.if_missing = if_missing});
      ASSERT_FALSE(opened);
      EXPECT_NE(opened.error().message.find("; open " + directory()), std::string::npos)
          << opened.error().message;
    }
  }
  // A store may have been opened before it was one.
  fs::rename(copy, copy + "-2");
  const auto early = Store::open(copy);
  ASSERT_TRUE(early);
  fs::rename(copy + "-2", copy);
  std::ofstream(copy + "/lock") << "";
  EXPECT_FALSE((*early)->begin(2, std::vector<std::uint64_t>{1}));
  for (const auto& collected : {(*early)->collect_if_used(), (*early)->collect()}) {
    ASSERT_TRUE(collected);
    EXPECT_TRUE(collected->removed.empty());
  }
  fs::remove(copy + "/lock");
  EXPECT_EQ(everything(), before);
  // Copying the shards home with `cp -r` copies the record, too.
  fs::copy(on_volume + "/home", directory() + "/home");
  save(*open(), 2);
  EXPECT_TRUE(is_whole(*open(), *open()->read_manifest(1)));
  // What has manifests is read all the same, and nothing in it changes.
  fs::rename(directory(), root_.file("renamed"));
  const auto read = Store::open(root_.file("renamed"));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(is_whole(**read, *(*read)->read_manifest(1)));
  const auto refused = (*read)->begin(3, std::vector<std::uint64_t>{1, 0});
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("remove that file"), std::string::npos) << refused.error().message;
}

TEST_F(StoreOpeningTest, ShardsWithoutAManifestAreNobodysDebris) {
  const auto store = open();
  save(*store, 1);
  ASSERT_TRUE(fs::remove(manifest_path(directory(), 1, 1)));
  ASSERT_TRUE(fs::remove(directory() + "/trunkline-checkpoints.json"));
  const Paths before = everything();
  for (const IfMissing if_missing : {IfMissing::create, IfMissing::fail}) {
    const auto opened = Store::open(directory(), {.if_missing = if_missing});
    ASSERT_FALSE(opened);
    EXPECT_NE(opened.error().message.find("step-00000001 has shards but no manifest"), std::string::npos)
        << opened.error().message;
  }
  for (const auto& collected : {store->collect_if_used(), store->collect()}) {
    ASSERT_TRUE(collected);
    EXPECT_TRUE(collected->removed.empty());
  }
  EXPECT_EQ(everything(), before);
}

TEST_F(StoreOpeningTest, AFirstSaveThatWasCutOffLeavesNothingForGood) {
  fs::create_directory(directory());
  for (const char* name : {"lock", ".trunkline-0123456789abcdef.tmp"})
    std::ofstream(fmt::format("{}/{}", directory(), name)) << "";
  const auto collected = open()->collect_if_used();
  ASSERT_TRUE(collected);
  EXPECT_EQ(collected->removed.size(), 1U);
  EXPECT_EQ(everything(), (Paths{"run/", "run/lock"}));
}

// As `cp -rs run copy` makes it.
TEST_F(StoreOpeningTest, RecordsBehindLinksStay) {
  const auto original = open();
  save(*original, 1);
  const std::string copy = root_.file("copy");
  fs::create_directory(copy);
  for (const auto& entry : fs::recursive_directory_iterator(directory())) {
    const fs::path there = copy / fs::relative(entry.path(), directory());
    if (entry.is_directory())
      fs::create_directory(there);
    else
      fs::create_symlink(entry.path(), there);
  }
  const std::string before = *os::read_text(directory() + "/trunkline-checkpoints.json");
  for (const StoreOptions& options : {StoreOptions{.fresh = true}, StoreOptions{.volumes = volumes()}}) {
    const auto linked = Store::open(copy, options);
    ASSERT_TRUE(linked) << linked.error().message;
    if (!options.fresh) load(**linked);
    const auto refused = (*linked)->begin(2, std::vector<std::uint64_t>(options.volumes ? 2 : 1, 1));
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().message.find("it is a symbolic link"), std::string::npos)
        << refused.error().message;
  }
  EXPECT_EQ(*os::read_text(directory() + "/trunkline-checkpoints.json"), before);
  save(*original, 2);
  EXPECT_EQ(open()->steps(), (std::vector<std::uint64_t>{1, 2}));
}

TEST_F(StoreOpeningTest, WhatDoesNotMakeADirectoryForeign) {
  fs::create_directory(directory());
  for (const char* name : {"run/.hidden", "run/lost+found", "run/lock"}) write(name);
  fs::create_directory(directory() + "/" + aside_directory("20260131T235959Z", 1));
  save(*open(), 1);
  write("run/notes");
  save(*open(), 2);
  fs::remove(directory() + "/trunkline-checkpoints.json");
  save(*open(), 3);
  EXPECT_EQ(open()->steps(), (Steps{1, 2, 3}));
}

TEST_F(StoreOpeningTest, WhatIsNotADirectoryIsRefused) {
  write("file");
  fs::create_symlink(root_.file("unmounted/run"), root_.file("link"));
  const auto before = everything();
  for (const auto& [path, why] : {std::pair{"file", "it is a file"},
                                  {"file/run", "a part of the path is a file"},
                                  {"link", "symbolic link to"}}) {
    const auto refused = Store::open(root_.file(path));
    ASSERT_FALSE(refused) << path;
    EXPECT_EQ(refused.error().code, ENOTDIR) << "a link may lead to checkpoints: not 'nothing yet'";
    EXPECT_NE(refused.error().message.find(why), std::string::npos) << refused.error().message;
  }
  EXPECT_EQ(everything(), before);
}

TEST_F(StoreOpeningTest, ALinkToADirectoryIsFollowed) {
  fs::create_directory(root_.file("real"));
  fs::create_directory_symlink(root_.file("real"), directory());
  save(*open({.volumes = volumes()}), 1);
  const auto real = Store::open(root_.file("real"));
  ASSERT_TRUE(real);
  save(**real, 2);
  EXPECT_EQ(open()->steps(), (Steps{1, 2}));
  EXPECT_TRUE(is_whole(**real, *(*real)->read_manifest(1)));
}

// It may have been moved away: what its manifests name on the volumes must not count as debris of the new
// one.
TEST_F(StoreOpeningTest, ADirectoryThatWentIsMadeAnewWithVolumesOfItsOwn) {
  const auto store = open({.volumes = volumes()});
  save(*store, 1);
  const StoreDescriptor before = store->descriptor();
  fs::rename(directory(), root_.file("moved"));
  save(*store, 2);
  EXPECT_NE(store->descriptor().id, before.id);
  EXPECT_EQ(store->descriptor().volumes.size(), 2U);
  ASSERT_TRUE(store->collect());
  EXPECT_EQ(open()->steps(), Steps{2});
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(2)));
  const auto moved = Store::open(root_.file("moved"));
  ASSERT_TRUE(moved) << moved.error().message;
  EXPECT_TRUE(is_whole(**moved, *(*moved)->read_manifest(1)));
  ASSERT_TRUE((*moved)->collect());
  EXPECT_TRUE(is_whole(**moved, *(*moved)->read_manifest(1)));
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(2)));
}

// Its mount point is there, with another filesystem under it: what is saved there would be hidden by the
// mount.
TEST_F(StoreOpeningTest, ADirectoryWhoseFilesystemWentIsNotMadeBelowTheMountPoint) {
  struct stat here{};
  struct stat shared{};
  if (::stat(root_.path().c_str(), &here) != 0 || ::stat("/dev/shm", &shared) != 0 ||
      here.st_dev == shared.st_dev || ::access("/dev/shm", W_OK) != 0)
    GTEST_SKIP() << "needs two filesystems, one of them at /dev/shm";
  const std::string disk = "/dev/shm/trunkline-opening-" + random_hex(16);
  const std::string mount_point = root_.file("mnt");
  fs::create_directory(disk);
  fs::create_directory_symlink(disk, mount_point);
  const auto store = Store::open(mount_point + "/run");
  ASSERT_TRUE(store);
  save(**store, 1);
  fs::remove(mount_point);
  fs::create_directory(mount_point);
  const auto refused = (*store)->begin(2, Steps{1});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ENOENT);
  EXPECT_NE(refused.error().message.find("mount"), std::string::npos) << refused.error().message;
  EXPECT_TRUE(fs::is_empty(mount_point));
  fs::remove(mount_point);
  fs::create_directory_symlink(disk, mount_point);
  save(**store, 2);
  EXPECT_EQ((*store)->steps(), (Steps{1, 2}));
  fs::remove_all(disk);
}

TEST_F(StoreOpeningTest, ADirectoryThatGoesDuringASaveFailsThatSaveAlone) {
  const auto store = open();
  save(*store, 1);
  const auto transaction = begin(*store, 2);
  const Manifest manifest = write_shards(*transaction);
  fs::remove_all(directory());
  const auto failed = transaction->commit(manifest);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, ENOENT);
  EXPECT_TRUE(transaction->abandon());
  save(*store, 3);
  EXPECT_EQ(open()->steps(), Steps{3});
}

TEST_F(StoreOpeningTest, ADirectoryThatCannotBeWrittenOpensAndFailsAtTheFirstSave) {
  if (::geteuid() == 0) GTEST_SKIP() << "root writes everywhere";
  fs::permissions(root_.path(), fs::perms(0555));
  const auto store = open();
  const auto refused = store->begin(1, Steps{1});
  fs::permissions(root_.path(), fs::perms(0755));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, EACCES);
  save(*store, 1);
  EXPECT_EQ(store->steps(), Steps{1});
}

}  // namespace
}  // namespace trunkline::checkpoint
