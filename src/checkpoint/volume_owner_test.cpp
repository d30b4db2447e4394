#include "checkpoint/volume_owner.h"

#include <gtest/gtest.h>

#include "checkpoint/names.h"
#include "checkpoint/store_fixture.h"
#include "checkpoint/volume_owner_record.h"
#include "os/durable.h"

namespace trunkline::checkpoint {
namespace {

namespace fs = std::filesystem;

using Steps = std::vector<std::uint64_t>;

class VolumeOwnerTest : public test::StoreTest {
 protected:
  void SetUp() override {
    const auto store = open({.volumes = volumes()});
    save(*store, 1);
    save(*store, 2);
    owner_ = store->descriptor().volumes[0] + "/" + std::string(kOwnerFile);
  }

  std::string copy(const std::string& name) const {
    fs::copy(directory(), root_.file(name), fs::copy_options::recursive);
    return root_.file(name);
  }

  std::vector<std::string> shards() const {
    auto found = everything();
    std::erase_if(found, [](const std::string& path) { return !path.ends_with(".safetensors"); });
    return found;
  }

  // The directory can be read, but nothing in it may change the contents of the volumes.
  void expect_refused(const std::string& directory, std::string_view why) {
    const auto before = shards();
    auto opened = Store::open(directory);
    ASSERT_TRUE(opened) << opened.error().message;
    Store& store = **opened;
    EXPECT_TRUE(is_whole(store, *store.read_manifest(2)));
    for (const Error& error :
         {store.begin(3, Steps{1, 1}).error(), store.begin(3, Steps{0, 0}).error(), store.collect().error(),
          store.remove(2).error(), store.collect(GarbageCollector::DryRun::yes).error(),
          Store::open(directory, {.volumes = {{root_.file("v2")}}}).error()}) {
      EXPECT_EQ(error.kind, ErrorKind::unsupported) << error.message;
      EXPECT_NE(error.message.find(directory), std::string::npos) << error.message;
      EXPECT_NE(error.message.find(why), std::string::npos) << error.message;
    }
    EXPECT_EQ(shards(), before);
  }

  std::string owner_;  // the record of the first volume
};

TEST_F(VolumeOwnerTest, ACopyCanOnlyBeRead) {
  const std::string other = copy("copy");
  load_and_save(*open(), 3, 2);
  std::ofstream(other + "/step-00000002/" + shard_file(0, 1, random_hex(16))) << "debris";
  expect_refused(other, "is a copy of " + directory());
  load_and_save(*open(), 4, 1);
  EXPECT_EQ(open()->steps(), Steps{4});
}

TEST_F(VolumeOwnerTest, ACopyThatLostItsDescriptorKeepsTheShardsOfTheOriginal) {
  const std::string other = copy("copy");
  fs::remove(other + "/trunkline-checkpoints.json");
  const auto before = shards();
  const auto store = Store::open(other);
  ASSERT_TRUE(store) << store.error().message;
  load(**store);
  const auto transaction = begin(**store, 9);
  ASSERT_TRUE(transaction->commit(write_shards(*transaction)));
  const auto collected = transaction->retain(1);
  ASSERT_TRUE(collected);
  EXPECT_EQ(collected->problems.size(), 2U);
  EXPECT_TRUE(collected->removed.empty());
  for (const std::string& path : before) EXPECT_TRUE(fs::exists(root_.file(path))) << path;
}

TEST_F(VolumeOwnerTest, AMovedDirectoryContinuesAndItsOldPathIsForgotten) {
  fs::rename(directory(), root_.file("moved"));
  load_and_save(**Store::open(root_.file("moved")), 3, 1);
  EXPECT_NE(os::read_text(owner_)->find(root_.file("moved")), std::string::npos);
  fs::copy(root_.file("moved"), directory(), fs::copy_options::recursive);  // a copy at the old path
  EXPECT_EQ(open()->begin(4, Steps{1, 1}).error().kind, ErrorKind::unsupported);
  load_and_save(**Store::open(root_.file("moved")), 4, 1);
}

TEST_F(VolumeOwnerTest, ACopyReplacesAMissingOriginalOnRequest) {
  const std::string other = copy("copy");
  EXPECT_EQ((*Store::open(other))->adopt().error().kind, ErrorKind::unsupported) << "the original exists";
  fs::remove_all(directory());
  expect_refused(other, "adopt " + other);
  const auto adopted = (*Store::open(other))->adopt();
  ASSERT_TRUE(adopted) << adopted.error().message;
  EXPECT_EQ(adopted->volumes.size(), 2U);
  EXPECT_TRUE(adopted->missing.empty());
  load_and_save(**Store::open(other), 3, 1);
  fs::copy(other, directory(), fs::copy_options::recursive);  // restored from a backup
  EXPECT_EQ(open()->begin(4, Steps{1, 1}).error().kind, ErrorKind::unsupported);
  EXPECT_EQ((*Store::open(other))->steps(), Steps{3});
}

// mv run run.bak; cp -r run.bak run
TEST_F(VolumeOwnerTest, ACopyInTheOriginalsPlaceDoesNotTakeItsShards) {
  fs::rename(directory(), root_.file("run.bak"));
  fs::copy(root_.file("run.bak"), directory(), fs::copy_options::recursive);
  expect_refused(directory(), "a copy in its place");
  load_and_save(**Store::open(root_.file("run.bak")), 3, 1);
  const std::string gone = *why_gone(fs::path(owner_).parent_path(), directory(), 1);
  EXPECT_NE(gone.find("belong to " + root_.file("run.bak") + ", where step 1 was removed"), std::string::npos)
      << gone;
  // When the user says so, the copy is the one that continues.
  fs::rename(root_.file("run.bak"), root_.file("kept"));
  ASSERT_TRUE(open()->adopt());
  save(*open(), 4);
  EXPECT_TRUE(
      is_whole(**Store::open(root_.file("kept")), *(*Store::open(root_.file("kept")))->read_manifest(3)));
  const Error error = (*Store::open(root_.file("kept")))->begin(5, Steps{1, 1}).error();
  EXPECT_NE(error.message.find("is a copy of " + directory()), std::string::npos) << error.message;
}

// Checkpoints saved since the backup are in the directory that was moved out of the way.
TEST_F(VolumeOwnerTest, ADirectoryRestoredFromABackupKeepsNewerShards) {
  const std::string backup = copy("backup");
  save(*open(), 3);
  fs::rename(directory(), root_.file("broken"));
  fs::copy(backup, directory(), fs::copy_options::recursive);
  expect_refused(directory(), "restored from a backup");
  ASSERT_TRUE(open()->adopt());
  const auto before = shards();
  const auto collected = open()->collect();
  ASSERT_TRUE(collected);
  EXPECT_TRUE(collected->removed.empty());
  ASSERT_EQ(collected->problems.size(), 1U);
  EXPECT_NE(collected->problems[0].message.find("step-00000003"), std::string::npos);
  EXPECT_EQ(shards(), before);
  // Saving the same step again does not remove them either.
  save(*open(), 3);
  load_and_save(*open(), 4, 1);
  const auto broken = Store::open(root_.file("broken"));
  EXPECT_TRUE(is_whole(**broken, *(*broken)->read_manifest(3)));
  EXPECT_FALSE(is_whole(**broken, *(*broken)->read_manifest(2))) << "owned by the adopting directory";
}

TEST_F(VolumeOwnerTest, AnOlderCopyDoesNotReplaceAnOriginalThatWasRenamed) {
  const std::string other = copy("copy");
  save(*open(), 3);
  fs::rename(directory(), root_.file("renamed"));
  expect_refused(other, "may be a copy of " + directory());
  EXPECT_TRUE((*Store::open(root_.file("renamed")))->collect());
  expect_refused(other, "is a copy of " + root_.file("renamed"));
}

TEST_F(VolumeOwnerTest, AnotherStoreAtTheOldPathIsNotTheOriginal) {
  const std::string other = copy("copy");
  fs::remove_all(directory());
  save(*open({.volumes = volumes()}), 1);
  expect_refused(other, "which now has other files");
  ASSERT_TRUE((*Store::open(other))->adopt());
  load_and_save(**Store::open(other), 3, 1);
  EXPECT_TRUE(is_whole(*open(), *open()->read_manifest(1)));
}

TEST_F(VolumeOwnerTest, AnotherPathToTheSameDirectoryIsTheOwner) {
  fs::create_directory_symlink(directory(), root_.file("link"));
  const std::string before = *os::read_text(owner_);
  load_and_save(**Store::open(root_.file("link")), 3, 1);
  EXPECT_EQ(*os::read_text(owner_), before);
  // As with a bind mount elsewhere: the recorded path does not exist, but the directory is the same.
  fs::rename(directory(), root_.file("mounted"));
  fs::remove(root_.file("link"));
  load_and_save(**Store::open(root_.file("mounted")), 4, 1);
}

TEST_F(VolumeOwnerTest, AnOwnerWhoseFilesystemIsNotMountedMayComeBack) {
  const std::string other = copy("copy");
  fs::remove_all(directory());
  // On a device that no filesystem here has.
  const std::string body = "18446744073709551615 7 " + directory() + "\n";
  const std::string text =
      fmt::format("trunkline home 1 crc32c={:08x}\n{}", crc32c(std::as_bytes(std::span(body))), body);
  ASSERT_TRUE(os::write_file_durably(owner_, text));
  expect_refused(other, "is it mounted?");
  fs::remove(owner_);
  const auto second = fs::path(volumes()[1]) / fs::path(owner_).parent_path().filename() / kOwnerFile;
  fs::remove(second);
  load_and_save(**Store::open(other), 3, 1);
}

// As after a restart: the same filesystem has another device number.
TEST_F(VolumeOwnerTest, ANewDeviceNumberIsNotAnotherDirectory) {
  auto record = parse_volume_owner(*os::read_text(owner_), owner_);
  ASSERT_TRUE(record);
  record->device += 1;
  ASSERT_TRUE(os::write_file_durably(owner_, format_volume_owner(*record)));
  save(*open(), 3);
  record->birth = 0;
  record->device += 1;
  ASSERT_TRUE(os::write_file_durably(owner_, format_volume_owner(*record)));
  load_and_save(*open(), 4, 1);
}

TEST_F(VolumeOwnerTest, AMissingVolumeIsNotAdopted) {
  const std::string other = copy("copy");
  fs::remove_all(directory());
  fs::rename(volumes()[1], root_.file("unmounted"));
  const auto adopted = (*Store::open(other))->adopt();
  ASSERT_TRUE(adopted);
  EXPECT_EQ(adopted->volumes.size(), 1U);
  EXPECT_EQ(adopted->missing.size(), 1U);
  fs::rename(root_.file("unmounted"), volumes()[1]);
  EXPECT_EQ((*Store::open(other))->begin(3, Steps{1, 1}).error().kind, ErrorKind::unsupported);
  ASSERT_TRUE((*Store::open(other))->adopt());
  load_and_save(**Store::open(other), 3, 1);
}

TEST_F(VolumeOwnerTest, ADirectoryWithoutARecordGetsOneFromASave) {
  fs::remove(owner_);
  load_and_save(*open(), 3, 1);
  EXPECT_TRUE(fs::exists(owner_));
  fs::remove(owner_);
  EXPECT_TRUE(open()->collect(GarbageCollector::DryRun::yes));
  EXPECT_FALSE(fs::exists(owner_));
  EXPECT_TRUE(open()->collect());
  EXPECT_FALSE(fs::exists(owner_)) << "it may have been opened as a copy";
}

TEST_F(VolumeOwnerTest, ADamagedRecordDoesNotGivePermission) {
  const std::string text = *os::read_text(owner_);
  for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    std::ofstream(owner_, std::ios::binary | std::ios::trunc) << flipped;
    const auto checked = check_owner(fs::path(owner_).parent_path(), directory());
    ASSERT_FALSE(checked) << flipped;
    EXPECT_TRUE(checked.error().kind == ErrorKind::corrupt || checked.error().kind == ErrorKind::format);
    EXPECT_EQ(checked.error().path, owner_);
  }
  for (std::size_t bytes = 0; bytes < text.size(); ++bytes) {
    std::ofstream(owner_, std::ios::binary | std::ios::trunc) << text.substr(0, bytes);
    EXPECT_FALSE(check_owner(fs::path(owner_).parent_path(), directory())) << bytes;
  }
  EXPECT_EQ(open()->begin(3, Steps{1, 1}).error().kind, ErrorKind::corrupt);
}

}  // namespace
}  // namespace trunkline::checkpoint
