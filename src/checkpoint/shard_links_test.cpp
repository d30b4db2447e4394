// Saves that link shards of an earlier checkpoint.
#include "checkpoint/shard_links.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <numeric>
#include <set>

#include "checkpoint/names.h"
#include "checkpoint/store_fixture.h"

namespace trunkline::checkpoint {
namespace {

using test::CrashPoint;
using Kind = DirectoryOps::Kind;

class ShardLinksTest : public test::StoreTest {
 protected:
  static std::vector<std::uint64_t> all_of(const Manifest& manifest) {
    std::vector<std::uint64_t> shards(manifest.shards.size());
    std::iota(shards.begin(), shards.end(), 0);
    return shards;
  }

  // Adds the links to a manifest as an incremental save does.
  static void add_links(Manifest& manifest, const ShardLinks& made, std::size_t most = 1000) {
    manifest.features = {std::string(kIncrementalFeature)};
    manifest.unit_bytes = kMinChunkBytes;
    for (const auto& link : made.links) {
      if (!link || most-- == 0) continue;
      const std::uint64_t bytes = link->shard.bytes;
      manifest.tensors.push_back(
          {.name = "of " + link->path,
           .dtype = "U8",
           .shape = {bytes},
           .pieces = {{.shard = manifest.shards.size(), .offset = 0, .bytes = bytes}}});
      manifest.shards.push_back(link->shard);
    }
  }

  // A save that takes over everything of the step `base`, and adds a shard on each volume. Whether it was
  // committed.
  static bool try_save(Store& store, std::uint64_t step, std::uint64_t base,
                       std::optional<std::uint64_t> keep) {
    const auto before = store.read_manifest(base);
    const std::vector<std::uint64_t> one_each(std::max<std::size_t>(1, store.descriptor().volumes.size()), 1);
    const auto transaction = store.begin(step, one_each);
    if (!before || !transaction) return false;
    const auto made = (*transaction)->link_shards(*before, all_of(*before));
    if (!made) return false;
    Manifest manifest = write_shards(**transaction);
    add_links(manifest, *made);
    if (!(*transaction)->commit(manifest)) return false;
    std::ignore = (*transaction)->retain(keep);
    return true;
  }

  static bool has(const std::vector<std::uint64_t>& steps, std::uint64_t step) {
    return std::ranges::find(steps, step) != steps.end();
  }

  static nlink_t links_of(const std::string& path) {
    struct stat status{};
    EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
    return status.st_nlink;
  }

  std::unique_ptr<Store> open_with(CrashPoint& crash) const {
    auto store = Store::open(directory(), {.volumes = volumes(), .watch = crash.watch()});
    if (!store) return nullptr;
    load(**store);
    return std::move(*store);
  }

  void clear() const {
    for (const auto& entry : std::filesystem::directory_iterator(root_.path()))
      std::filesystem::remove_all(entry.path());
  }
};

TEST_F(ShardLinksTest, EachStepIsWholeWhenAnyOtherIsRemoved) {
  for (const std::uint64_t removed : {1U, 2U, 3U}) {
    clear();
    const auto store = open({.volumes = volumes()});
    save(*store, 1);
    ASSERT_TRUE(try_save(*store, 2, 1, {}));
    ASSERT_TRUE(try_save(*store, 3, 2, {}));
    const Manifest last = *store->read_manifest(3);
    EXPECT_EQ(last.shards.size(), store->read_manifest(1)->shards.size() + 4);
    EXPECT_EQ(last.shards.back().commit, 1U) << "the commit that wrote it, not the one that linked it last";
    EXPECT_GT(links_of(shard_path(directory(), last, last.shards.size() - 1)), 2U);
    ASSERT_TRUE(store->remove(removed));
    const auto collected = store->collect();
    ASSERT_TRUE(collected && collected->problems.empty());
    const std::vector<std::uint64_t> left = *store->steps();
    EXPECT_EQ(left.size(), 2U);
    for (const std::uint64_t step : left) EXPECT_TRUE(is_whole(*store, *store->read_manifest(step)));
  }
}

TEST_F(ShardLinksTest, ASaveMayStopBeforeAnyOfItsChanges) {
  std::size_t stops = 0;
  for (std::size_t allowed = 0;; ++allowed) {
    clear();
    {
      CrashPoint none;
      const auto store = open_with(none);
      save(*store, 1);
      ASSERT_TRUE(try_save(*store, 2, 1, {}));
    }
    CrashPoint crash{.allowed = allowed};
    const bool committed = try_save(*open_with(crash), 3, 2, 1);
    const auto store = open();
    const std::vector<std::uint64_t> steps = *store->steps();
    EXPECT_EQ(store->latest(), has(steps, 3) ? 3U : 2U);
    EXPECT_TRUE(!committed || has(steps, 3)) << allowed;
    const auto collected = store->collect();
    ASSERT_TRUE(collected && collected->problems.empty() && !collected->is_busy);
    EXPECT_EQ(*store->steps(), steps) << "collection changed what there is";
    std::set<std::string> named;
    for (const std::uint64_t step : steps) {
      const Manifest manifest = *store->read_manifest(step);
      EXPECT_TRUE(is_whole(*store, manifest)) << "step " << step << " after " << allowed << " changes";
      for (std::size_t i = 0; i < manifest.shards.size(); ++i)
        named.insert(shard_path(store->directory(), manifest, i));
    }
    std::set<std::string> found;
    for (const std::string& path : everything()) {
      if (path.ends_with(".safetensors")) found.insert(root_.file(path));
    }
    EXPECT_EQ(found, named);
    if (committed && steps.size() == 1) break;
    ++stops;
    ASSERT_LT(allowed, 1000U);
  }
  EXPECT_GT(stops, 20U);
}

// What a power failure keeps is what was made durable.
TEST_F(ShardLinksTest, LinksAreDurableBeforeTheManifestThatNamesThem) {
  CrashPoint record;
  {
    const auto store = open_with(record);
    save(*store, 1);
    ASSERT_TRUE(try_save(*store, 2, 1, 1));
  }
  const auto parent = [](const std::string& path) { return std::filesystem::path(path).parent_path(); };
  std::set<std::string> unsynced;  // directories of links
  std::size_t links = 0;
  std::size_t manifests = 0;
  for (const auto& [kind, path] : record.passed) {
    if (kind == Kind::link_file) unsynced.insert(parent(path));
    if (kind == Kind::link_file) ++links;
    if (kind == Kind::sync_directory) unsynced.erase(path);
    if (kind != Kind::write_file || !commit_of(std::filesystem::path(path).filename().string())) continue;
    EXPECT_TRUE(unsynced.empty()) << path;
    ++manifests;
  }
  EXPECT_GE(links, 4U);
  EXPECT_EQ(manifests, 2U);
}

TEST_F(ShardLinksTest, WhatTheManifestDoesNotNameGoes) {
  const auto store = open();
  save(*store, 1);
  const Manifest before = *store->read_manifest(1);
  const auto transaction = begin(*store, 2);
  const auto made = transaction->link_shards(before, all_of(before));
  ASSERT_TRUE(made);
  Manifest manifest = write_shards(*transaction);
  add_links(manifest, *made, 1);
  ASSERT_TRUE(transaction->commit(manifest));
  EXPECT_EQ(links_of(shard_path(directory(), before, 0)), 2U);
  EXPECT_EQ(links_of(shard_path(directory(), before, 1)), 1U);
  EXPECT_FALSE(std::filesystem::exists(made->links[1]->path));
  EXPECT_EQ(transaction->link_shards(before, all_of(before)).error().kind, ErrorKind::invalid_argument);
}

TEST_F(ShardLinksTest, ALinkedShardIsAsYoungAsTheStep) {
  const auto store = open();
  save(*store, 1);
  const std::string shard = shard_path(directory(), *store->read_manifest(1), 0);
  const auto old = std::filesystem::last_write_time(shard) - std::chrono::hours(1000);
  std::filesystem::last_write_time(shard, old);
  ASSERT_TRUE(try_save(*store, 2, 1, {}));
  EXPECT_GT(std::filesystem::last_write_time(shard), old + std::chrono::hours(999));
}

TEST_F(ShardLinksTest, WhatCannotBeLinkedIsNot) {
  bool fails = false;
  const auto watch = [&](Kind kind, const std::string& path) -> Status {
    if (!fails || kind != Kind::link_file) return {};
    return std::unexpected(system_error(EPERM, "link", path));
  };
  const auto store = open({.watch = watch});
  save(*store, 1);
  const Manifest before = *store->read_manifest(1);
  std::filesystem::resize_file(shard_path(directory(), before, 0), 10);
  const auto linked = [&](std::span<const std::uint64_t> wanted, const Manifest& base) {
    const auto transaction = begin(*store, 2);
    const auto made = transaction->link_shards(base, wanted);
    EXPECT_TRUE(made);
    EXPECT_TRUE(transaction->abandon());
    return *made;
  };
  const ShardLinks made = linked(all_of(before), before);
  EXPECT_FALSE(made.links[0]);
  EXPECT_TRUE(made.links[1]);
  EXPECT_EQ(made.problem->kind, ErrorKind::corrupt);
  EXPECT_FALSE(linked(std::vector<std::uint64_t>{7}, before).links[0]) << "it has no such shard";
  Manifest elsewhere = before;
  elsewhere.volumes = {"/elsewhere"};
  EXPECT_FALSE(linked(all_of(before), elsewhere).links[1]);
  fails = true;
  EXPECT_EQ(linked(std::vector<std::uint64_t>{1}, before).problem->code, EPERM);
  EXPECT_EQ(links_of(shard_path(directory(), before, 1)), 1U) << "abandoned saves leave no links";
}

TEST_F(ShardLinksTest, ASaveOfTheSameStepMayLinkWhatItReplaces) {
  const auto store = open({.volumes = volumes()});
  save(*store, 1);
  ASSERT_TRUE(try_save(*store, 1, 1, {}));
  EXPECT_TRUE(is_whole(*store, *store->read_manifest(1)));
  EXPECT_EQ(store->read_manifest(1)->commit, 2U);
}

}  // namespace
}  // namespace trunkline::checkpoint
