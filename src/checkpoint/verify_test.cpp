#include "checkpoint/verify.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "checkpoint/store_fixture.h"
#include "checkpoint/tensor_places.h"
#include "trunkline/trunkline.h"

namespace trunkline::checkpoint {
namespace {

using MismatchKind = Mismatch::Kind;

class VerifyTest : public test::StoreTest {
 protected:
  static constexpr std::size_t kBytes = 9 * kMiB + 12'345;  // blocks, and a short chunk at the end

  void SetUp() override {
    engine_ = make_engine({});
    store_ = open({.volumes = volumes()});
    save(*store_, 1, {}, kBytes);
    manifest_ = *store_->read_manifest(1);
  }

  static Engine make_engine(EngineOptions options) {
    options.lanes = 1;
    auto engine = Engine::create(options);
    EXPECT_TRUE(engine) << engine.error().message;
    return std::move(*engine);
  }

  std::string path_of(std::size_t shard) const { return shard_path(directory(), manifest_, shard); }

  static void flip(const std::string& path, std::uint64_t offset, unsigned bit = 3) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const char byte = static_cast<char>(file.get() ^ (1 << bit));
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(byte);
    ASSERT_TRUE(file.flush().good());
  }

  VerifyReport check(const VerifyOptions& options = {}) const {
    auto report = verify(engine_, directory(), manifest_, options);
    EXPECT_TRUE(report) << report.error().message;
    return report.value_or(VerifyReport{});
  }

  Engine engine_;
  std::unique_ptr<Store> store_;
  Manifest manifest_;
};

TEST_F(VerifyTest, AFreshCheckpointIsIntact) {
  std::vector<std::uint64_t> progress;
  const auto report = check({.on_progress = [&](std::uint64_t bytes) { progress.push_back(bytes); }});
  EXPECT_TRUE(report.mismatches.empty());
  EXPECT_EQ(report.bytes, 4 * kBytes);
  EXPECT_EQ(bytes_to_verify(manifest_), 4 * kBytes);
  ASSERT_FALSE(progress.empty());
  EXPECT_TRUE(std::ranges::is_sorted(progress));
  EXPECT_EQ(progress.back(), 4 * kBytes);
}

TEST_F(VerifyTest, EveryFlippedBitIsReported) {
  struct Flip {
    std::size_t shard;
    std::uint64_t offset;
    std::uint64_t chunk;
  };
  // First and last byte of a file, and both sides of the boundaries of a chunk and a block.
  const Flip flips[] = {{0, 0, 0},        {0, kMiB - 1, 0}, {0, kMiB, 1},       {1, 4 * kMiB - 1, 3},
                        {1, 4 * kMiB, 4}, {2, 9 * kMiB, 9}, {3, kBytes - 1, 9}, {3, 50, 0}};
  for (const auto& [shard, offset, chunk] : flips) {
    flip(path_of(shard), offset);
    const auto report = check();
    ASSERT_EQ(report.mismatches.size(), 1U) << offset;
    const Mismatch& found = report.mismatches[0];
    EXPECT_EQ(found.kind, MismatchKind::checksum);
    EXPECT_EQ(found.shard, shard);
    EXPECT_EQ(found.path, path_of(shard));
    EXPECT_EQ(found.chunk, chunk);
    EXPECT_EQ(found.offset, chunk * kMiB);
    EXPECT_EQ(found.bytes, chunk == 9 ? 12'345U : kMiB);
    EXPECT_EQ(found.tensors, std::vector{fmt::format("t{}", shard)});
    for (const std::string& part :
         {found.path, fmt::format("chunk {}", chunk), fmt::format("tensor t{}", shard)})
      EXPECT_NE(found.message.find(part), std::string::npos) << found.message;
    flip(path_of(shard), offset);
  }
  EXPECT_TRUE(check().mismatches.empty());
}

TEST_F(VerifyTest, AllMismatchesAreListedInOrder) {
  for (const std::size_t shard : {3, 0}) {
    for (const std::uint64_t chunk : {8, 0, 5}) flip(path_of(shard), chunk * kMiB + 7);
  }
  const auto report = check();
  std::vector<std::pair<std::uint64_t, std::uint64_t>> found;
  for (const Mismatch& each : report.mismatches) found.emplace_back(each.shard, each.chunk.value());
  EXPECT_EQ(found, (std::vector<std::pair<std::uint64_t, std::uint64_t>>{
                       {0, 0}, {0, 5}, {0, 8}, {3, 0}, {3, 5}, {3, 8}}));
}

TEST_F(VerifyTest, BytesOutsideTensorsAreChecked) {
  manifest_.tensors.clear();
  flip(path_of(0), 99);
  const auto report = check();
  ASSERT_EQ(report.mismatches.size(), 1U);
  EXPECT_TRUE(report.mismatches[0].tensors.empty());
  EXPECT_NE(report.mismatches[0].message.find("no tensor"), std::string::npos);
}

TEST_F(VerifyTest, MissingShortAndLongFilesAreReported) {
  std::filesystem::remove(path_of(0));
  std::filesystem::resize_file(path_of(1), 5 * kMiB + 1);
  std::filesystem::resize_file(path_of(2), kBytes + 1);
  std::filesystem::resize_file(path_of(3), 0);
  flip(path_of(1), 4 * kMiB);
  std::uint64_t progress = 0;
  const auto report = check({.on_progress = [&](std::uint64_t bytes) { progress = bytes; }});
  std::vector<std::pair<std::uint64_t, MismatchKind>> found;
  for (const Mismatch& each : report.mismatches) found.emplace_back(each.shard, each.kind);
  EXPECT_EQ(found, (std::vector<std::pair<std::uint64_t, MismatchKind>>{{0, MismatchKind::missing},
                                                                        {1, MismatchKind::size},
                                                                        {1, MismatchKind::checksum},
                                                                        {2, MismatchKind::size},
                                                                        {3, MismatchKind::size}}));
  EXPECT_NE(report.mismatches[0].message.find("ENOENT"), std::string::npos);
  EXPECT_EQ(report.mismatches[0].tensors, std::vector<std::string>{"t0"});
  EXPECT_EQ(report.mismatches[2].chunk, 4U);
  EXPECT_EQ(report.bytes, 5 * kMiB + kBytes) << "what can be read is verified";
  EXPECT_EQ(progress, 4 * kBytes);
}

TEST_F(VerifyTest, ChunksThatCannotBeReadAreReportedAndTheOthersChecked) {
  const auto faults = Faults::create();
  engine_ = make_engine({.block_bytes = kMiB, .faults = faults});
  faults->fail(Op::read, 2, EIO, 45);  // more than the 40 transfers: some chunks fail when read alone, too
  const auto report = check();
  EXPECT_GE(report.mismatches.size(), 1U);
  for (const Mismatch& each : report.mismatches) {
    EXPECT_EQ(each.kind, MismatchKind::unread);
    EXPECT_NE(each.message.find("EIO"), std::string::npos) << each.message;
  }
  std::uint64_t unread = 0;
  for (const Mismatch& each : report.mismatches) unread += each.bytes;
  EXPECT_EQ(report.bytes + unread, 4 * kBytes);
  EXPECT_GT(faults->injected(), 0U);
}

TEST_F(VerifyTest, AFileThatCannotBeOpenedIsNotMissing) {
  std::filesystem::remove(path_of(1));
  std::filesystem::create_symlink(path_of(1), path_of(1));  // a loop
  const auto found = check().mismatches;
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].kind, MismatchKind::unread);
  EXPECT_EQ(found[0].code, ELOOP);
  EXPECT_FALSE(found[0].chunk);
}

TEST_F(VerifyTest, DisturbancesAreNotDamage) {
  const auto faults = Faults::create();
  engine_ = make_engine({.block_bytes = 256 * kKiB, .faults = faults});
  faults->disturb(7, 0.2, 0.2);
  EXPECT_TRUE(check().mismatches.empty());
  EXPECT_GT(faults->injected(), 0U);
}

TEST_F(VerifyTest, ASmallBudgetSuffices) {
  engine_ = make_engine({.queue_depth = 1, .block_bytes = kMiB, .pinned_budget_bytes = 10 * kMiB});
  flip(path_of(3), 8 * kMiB);
  EXPECT_EQ(check().mismatches.size(), 1U);
  EXPECT_LE(engine_.stats().peak_pinned_bytes, 10 * kMiB);
}

TEST_F(VerifyTest, CancellingStopsItAndLeavesNothingInFlight) {
  int calls = 0;
  const auto report = verify(engine_, directory(), manifest_, {.cancelled = [&] { return ++calls == 1; }});
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().kind, ErrorKind::cancelled);
  EXPECT_TRUE(check().mismatches.empty());

  // Even while reads are held back indefinitely.
  const auto faults = Faults::create();
  engine_ = make_engine({.faults = faults});
  faults->hold(Op::read, 0, 1000);
  const auto held = verify(engine_, directory(), manifest_, {.cancelled = [&] {
                             faults->release();
                             return true;
                           }});
  ASSERT_FALSE(held);
  EXPECT_EQ(held.error().kind, ErrorKind::cancelled);
}

TEST_F(VerifyTest, SmallAndLargeChunksAndEmptyShards) {
  for (const std::uint64_t chunk : {kMinChunkBytes, 8 * kMiB, kMaxChunkBytes}) {
    Manifest manifest = manifest_;
    manifest.chunk_bytes = chunk;
    for (std::size_t i = 0; i < manifest.shards.size(); ++i) {
      const auto text = *os::read_text(path_of(i));
      manifest.shards[i].crc32c.clear();
      for (std::size_t at = 0; at < text.size(); at += chunk)
        manifest.shards[i].crc32c.push_back(
            crc32c(std::as_bytes(std::span(text).subspan(at, std::min(chunk, text.size() - at)))));
    }
    const auto good = verify(engine_, directory(), manifest);
    ASSERT_TRUE(good) << good.error().message;
    EXPECT_TRUE(good->mismatches.empty());
    manifest.shards[1].crc32c.back() ^= 1;
    const auto bad = verify(engine_, directory(), manifest);
    ASSERT_EQ(bad->mismatches.size(), 1U);
    EXPECT_EQ(bad->mismatches[0].chunk, manifest.shards[1].crc32c.size() - 1);
  }
  std::filesystem::resize_file(path_of(0), 0);
  const Manifest empty{
      .step = 1, .volumes = manifest_.volumes, .shards = {{.file = manifest_.shards[0].file, .crc32c = {}}}};
  EXPECT_TRUE(verify(engine_, directory(), empty)->mismatches.empty());
  EXPECT_TRUE(verify(engine_, directory(), Manifest{.step = 1})->mismatches.empty());
}

TEST(TensorPlaces, ListsTensorsThatOverlapTheRange) {
  const Manifest manifest{
      .volumes = {"."},
      .shards = {{.file = "a", .bytes = 100, .crc32c = {}}, {.file = "b", .bytes = 100, .crc32c = {}}},
      .tensors = {{.name = "late", .dtype = "x", .shape = {}, .pieces = {{0, 50, 10}}},
                  {.name = "wide", .dtype = "x", .shape = {}, .pieces = {{0, 10, 80}, {1, 0, 1}}},
                  {.name = "none", .dtype = "x", .shape = {}, .pieces = {{0, 20, 0}}}}};
  const TensorPlaces places(manifest);
  using Names = std::vector<std::string>;
  EXPECT_EQ(places.in(0, 0, 10), Names{});
  EXPECT_EQ(places.in(0, 0, 11), Names{"wide"});
  EXPECT_EQ(places.in(0, 59, 60), (Names{"wide", "late"}));
  EXPECT_EQ(places.in(0, 60, 90), Names{"wide"});
  EXPECT_EQ(places.in(0, 90, 100), Names{});
  EXPECT_EQ(places.in(1, 0, 100), Names{"wide"});
}

}  // namespace
}  // namespace trunkline::checkpoint
