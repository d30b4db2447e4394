// What a store does for tiers: copies of checkpoints of another directory, and the record of them.
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include "checkpoint/listing.h"
#include "checkpoint/names.h"
#include "checkpoint/store.h"
#include "checkpoint/store_fixture.h"

namespace trunkline::checkpoint {
namespace {

class StoreTiersTest : public test::StoreTest {};

TEST_F(StoreTiersTest, RetentionKeepsStepsThatSomebodyStillNeeds) {
  const auto store = open();
  for (const std::uint64_t step : {1, 2, 3}) save(*store, step);
  const auto transaction = begin(*store, 4);
  ASSERT_TRUE(transaction->commit(write_shards(*transaction)));
  ASSERT_TRUE(transaction->retain(1, {.steps = {2}}));
  EXPECT_EQ(*store->steps(), (std::vector<std::uint64_t>{2, 4}));
}

TEST_F(StoreTiersTest, ACommitHasAtLeastTheNumberThatIsRequested) {
  const auto store = open();
  save(*store, 1);
  const auto transaction = begin(*store, 2);
  EXPECT_EQ(*transaction->commit(write_shards(*transaction), 70), 70U);
  transaction->release();
  EXPECT_EQ(save(*store, 3), 71U);
}

TEST_F(StoreTiersTest, ACopyKeepsTheNumberOfItsCommitAndHasShardsOfItsOwn) {
  const auto store = open({.volumes = volumes()});
  for (const std::uint64_t step : {1, 2, 3}) save(*store, step);
  const Manifest original = *store->read_manifest(3);
  const auto copies = *Store::open(root_.file("tier"));
  const auto transaction = *copies->begin(3, std::vector<std::uint64_t>{original.shards.size()});
  for (std::size_t i = 0; i < original.shards.size(); ++i)
    std::filesystem::copy_file(shard_path(directory(), original, i), transaction->placement().paths[i]);
  EXPECT_EQ(*transaction->commit_copy(original), 3U);
  transaction->release();
  std::filesystem::remove_all(directory());
  for (const std::string& volume : volumes()) std::filesystem::remove_all(volume);
  Manifest copy = *copies->read_manifest(3);
  EXPECT_TRUE(is_whole(*copies, copy));
  EXPECT_EQ(copy.volumes, std::vector<std::string>{std::string(kOwnVolume)});
  copy.volumes = original.volumes;
  copy.shards = original.shards;
  copy.time = original.time;
  EXPECT_EQ(copy, original);
}

TEST_F(StoreTiersTest, CopiesThatWereRemovedAreMadeAgainWithTheirNumbers) {
  const auto store = open();
  for (const std::uint64_t step : {1, 2, 3}) save(*store, step);
  const auto copies = *Store::open(root_.file("tier"));
  const auto copy = [&](std::uint64_t step) {
    const Manifest original = *store->read_manifest(step);
    const auto transaction = *copies->begin(step, std::vector<std::uint64_t>{original.shards.size()});
    for (std::size_t i = 0; i < original.shards.size(); ++i)
      std::filesystem::copy_file(shard_path(directory(), original, i), transaction->placement().paths[i]);
    const auto committed = transaction->commit_copy(original);
    transaction->release();
    return committed;
  };
  for (const std::uint64_t step : {1, 2, 3}) ASSERT_EQ(*copy(step), step);
  for (const std::uint64_t step : {2, 3})
    std::filesystem::remove_all(root_.file("tier") + "/" + step_directory(step));
  EXPECT_EQ(*copy(2), 2U);
  EXPECT_EQ(*copy(3), 3U);
}

TEST_F(StoreTiersTest, ACopyIsRefusedWhereItsNumberIsTaken) {
  const auto store = open();
  save(*store, 1);
  const Manifest original = *store->read_manifest(1);
  const auto copies = *Store::open(root_.file("tier"));
  save(*copies, 0);
  const auto transaction = *copies->begin(1, std::vector<std::uint64_t>{original.shards.size()});
  for (std::size_t i = 0; i < original.shards.size(); ++i)
    std::filesystem::copy_file(shard_path(directory(), original, i), transaction->placement().paths[i]);
  const auto committed = transaction->commit_copy(original);
  ASSERT_FALSE(committed);
  EXPECT_EQ(committed.error().code, EEXIST);
  EXPECT_EQ(*copies->steps(), std::vector<std::uint64_t>{0});
}

TEST_F(StoreTiersTest, TiersAreOnRecordForOneDescriptor) {
  const auto store = open();
  EXPECT_TRUE(store->tiers()->empty());
  save(*store, 1);
  const std::vector<RecordedTier> tiers{{.directory = "/shared/run", .id = ""}};
  ASSERT_TRUE(store->record_tiers(tiers));
  EXPECT_EQ(*store->tiers(), tiers);
  EXPECT_EQ(*open()->tiers(), tiers);
  save(*open({.fresh = true}), 1);  // another descriptor
  EXPECT_TRUE(open()->tiers()->empty());
}

}  // namespace
}  // namespace trunkline::checkpoint
