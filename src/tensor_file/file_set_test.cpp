#include "tensor_file/file_set.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "io/engine_core.h"
#include "mem/staging_pool.h"
#include "support/sanitizers.h"
#include "tensor_file/file_layout_fixture.h"

namespace trunkline::tensor_file {
namespace {

using test::contents_of;
using test::random_sample;
using test::Sample;

class FileSetTest : public test::FileLayoutTest {
 protected:
  static Status save(const Engine& engine, std::vector<FileLayout> layouts, FileSetOptions options = {}) {
    auto set = FileSet::create(engine, std::move(layouts), options);
    if (!set) return std::unexpected(set.error());
    if (auto staged = (*set)->stage(); !staged) return staged;
    return (*set)->finish();
  }

  Sample sample(std::uint64_t bytes, const std::string& name) {
    return random_sample(random_, bytes, root_.file(name));
  }

  std::mt19937_64 random_{11};
};

TEST_F(FileSetTest, FilesHoldTheirLayouts) {
  const Engine engine = make_engine();
  for (int round = 0; round < test::scaled(40); ++round) {
    FileSetOptions options{.durable = round % 3 == 0, .replace = true, .write = {}};
    options.write.stage_all = round % 2 == 0;
    options.write.copiers = 1 + round % 3;
    options.write.staging_bytes = (random_() % 8) * 4 * kMiB;
    std::vector<Sample> samples;
    std::vector<FileLayout> layouts;
    for (int file = 0; file < 1 + round % 3; ++file) {
      samples.push_back(sample(random_() % (test::scaled(24 * kMiB)), fmt::format("f{}", file)));
      layouts.push_back(samples.back().layout);
    }
    auto set = FileSet::create(engine, layouts, options);
    ASSERT_TRUE(set) << set.error().message;
    ASSERT_TRUE((*set)->stage());
    if (options.write.stage_all) {
      // From here on the memory belongs to its owner again.
      for (Sample& each : samples)
        for (Buffer& buffer : each.memory) std::memset(buffer.data(), 0xEE, buffer.size());
    }
    ASSERT_TRUE((*set)->finish());
    for (std::size_t i = 0; i < samples.size(); ++i) {
      EXPECT_EQ(contents_of(samples[i].layout.path), samples[i].file) << "round " << round;
      for (std::size_t checksum = 0; checksum < samples[i].layout.checksums.size(); ++checksum)
        EXPECT_EQ((*set)->checksums(i)[checksum],
                  samples[i].checksum_of(samples[i].layout.checksums[checksum]));
    }
    EXPECT_EQ((*set)->bytes_done(), (*set)->bytes_total());
  }
  EXPECT_EQ(names(), (std::vector<std::string>{"f0", "f1", "f2"}));
}

TEST_F(FileSetTest, StagingBlocksAreReusedAndFreedWhenTheBudgetRunsShort) {
  const Engine engine = make_engine({.block_bytes = 64 * kKiB, .pinned_budget_bytes = 64 * kMiB});
  const Sample data = sample(20 * kMiB, "f");
  const FileSetOptions options{.write = {.stage_all = true, .staging_bytes = 32 * kMiB}};
  ASSERT_TRUE(save(engine, {data.layout}, options));
  const std::uint64_t kept = engine.stats().pinned_bytes;
  EXPECT_GE(kept, 4 * kMiB);
  ASSERT_TRUE(save(engine, {data.layout}, options));
  EXPECT_LE(engine.stats().pinned_bytes, 32 * kMiB + kept);
  EXPECT_TRUE(engine.allocate(40 * kMiB));
  EXPECT_EQ(contents_of(data.layout.path), data.file);
}

TEST_F(FileSetTest, TooSmallABudgetFailsAndASmallOneSuffices) {
  const Sample data = sample(40 * kMiB, "f");
  const FileSetOptions options{.write = {.stage_all = true, .staging_bytes = 64 * kMiB, .copiers = 3}};
  const Status status =
      save(make_engine({.lanes = 1, .block_bytes = 64 * kKiB, .pinned_budget_bytes = 2 * kMiB}),
           {data.layout}, options);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().kind, ErrorKind::out_of_budget);
  EXPECT_TRUE(names().empty());
  // Room for a few blocks besides the lane's bounce buffers.
  const Engine small = make_engine({.lanes = 1, .block_bytes = 64 * kKiB, .pinned_budget_bytes = 40 * kMiB});
  const Status enough = save(small, {data.layout}, options);
  ASSERT_TRUE(enough) << enough.error().message;
  EXPECT_LE(small.stats().peak_pinned_bytes, 40 * kMiB);
  EXPECT_EQ(contents_of(data.layout.path), data.file);
}

TEST_F(FileSetTest, EveryFailedCompletionLeavesTheOldFile) {
  const Sample before = sample(300'000, "f");
  const Sample after = sample(12 * kMiB, "f");
  for (const bool stage_all : {false, true}) {
    for (std::uint64_t at = 0;; at += trunkline::test::kPositionStep) {
      for (const Op op : {Op::write, Op::sync}) {
        ASSERT_TRUE(save(make_engine(), {before.layout}));
        const auto faults = Faults::create();
        faults->fail(op, at, op == Op::sync ? EIO : ENOSPC);
        const Status status = save(make_engine({.block_bytes = kMiB, .faults = faults}), {after.layout},
                                   {.write = {.stage_all = stage_all, .copiers = 2}});
        if (faults->injected() == 0) {
          ASSERT_TRUE(status) << status.error().message;
          EXPECT_EQ(contents_of(after.layout.path), after.file);
        } else {
          ASSERT_FALSE(status);
          EXPECT_EQ(status.error().code, op == Op::sync ? EIO : ENOSPC);
          EXPECT_EQ(status.error().path, before.layout.path);
          EXPECT_EQ(contents_of(before.layout.path), before.file);
        }
        EXPECT_EQ(names(), (std::vector<std::string>{"f"}));
        if (op == Op::write && faults->injected() == 0) goto next;
      }
    }
  next:;
  }
}

TEST_F(FileSetTest, DisturbedCompletionsChangeNothing) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    const auto faults = Faults::create();
    faults->disturb(seed, 0.2, 0.2);
    const Sample data = sample(9 * kMiB + seed, "f");
    ASSERT_TRUE(
        save(make_engine({.faults = faults}), {data.layout}, {.write = {.stage_all = seed % 2 == 0}}));
    EXPECT_EQ(contents_of(data.layout.path), data.file);
  }
}

// Someone copies a directory during a save, and swaps the two.
TEST_F(FileSetTest, AFileThatWasSwappedForACopyIsDetected) {
  namespace fs = std::filesystem;
  for (const bool replace : {true, false}) {
    for (const auto& entry : fs::directory_iterator(root_.path())) fs::remove_all(entry.path());
    fs::create_directory(root_.file("run"));
    const Engine engine = make_engine();
    const Sample before = sample(300'000, "run/f");
    if (replace) {
      ASSERT_TRUE(save(engine, {before.layout}));
    }
    const Sample after = sample(300'000, "run/f");
    auto set = FileSet::create(engine, {after.layout}, {.replace = replace});
    ASSERT_TRUE(set) << set.error().message;
    fs::copy(root_.file("run"), root_.file("copy"), fs::copy_options::recursive);
    fs::rename(root_.file("run"), root_.file("old"));
    fs::rename(root_.file("copy"), root_.file("run"));
    ASSERT_TRUE((*set)->stage());
    const Status finished = (*set)->finish();
    ASSERT_FALSE(finished);
    EXPECT_EQ(finished.error().code, ESTALE);
    EXPECT_EQ(finished.error().path, before.layout.path);
    if (replace) {
      EXPECT_EQ(contents_of(before.layout.path), before.file);
    }
  }
}

TEST_F(FileSetTest, CancelledOrDroppedItLeavesNothing) {
  const auto faults = Faults::create();
  faults->hold(Op::write, 0, 1000);
  const Engine engine = make_engine({.faults = faults});
  const Sample data = sample(30 * kMiB, "f");
  {
    auto set = FileSet::create(engine, {data.layout}, {.write = {.staging_bytes = 16 * kMiB}});
    ASSERT_TRUE(set);
    EXPECT_EQ(names().size(), 1U);
    (*set)->cancel();
    const Status staged = (*set)->stage();
    ASSERT_FALSE(staged);
    EXPECT_EQ(staged.error().kind, ErrorKind::cancelled);
    EXPECT_TRUE(names().empty());
    EXPECT_EQ((*set)->bytes_done(), 0U);
    faults->release();
  }
  {
    auto set = FileSet::create(engine, {data.layout}, {});
    ASSERT_TRUE(set);
    EXPECT_EQ(names().size(), 1U);
  }
  EXPECT_TRUE(names().empty());
}

// A caller that catches an error may keep the set alive with it, for as long as it likes.
TEST_F(FileSetTest, AFailureReleasesFilesAndMemoryAtOnce) {
  for (const Op op : {Op::write, Op::sync}) {
    for (const bool replace : {true, false}) {
      const auto faults = Faults::create();
      faults->fail(op, 0, EIO);
      const Engine engine = make_engine({.faults = faults});
      const Sample data = sample(9 * kMiB, "f");
      auto set = FileSet::create(engine, {data.layout}, {.replace = replace, .write = {.stage_all = true}});
      ASSERT_TRUE(set);
      const bool failed = !(*set)->stage() || !(*set)->finish();
      EXPECT_TRUE(failed);
      EXPECT_TRUE(names().empty());
      engine.core()->staging()->trim();
      EXPECT_EQ(engine.stats().pinned_bytes, 0U);
      EXPECT_FALSE((*set)->finish()) << "the error should persist";
      (*set)->discard();
    }
  }
}

TEST_F(FileSetTest, DiscardingAFinishedSetChangesNothing) {
  const Sample data = sample(kMiB, "f");
  auto set = FileSet::create(make_engine(), {data.layout}, {});
  ASSERT_TRUE(set);
  ASSERT_TRUE((*set)->stage());
  ASSERT_TRUE((*set)->finish());
  (*set)->discard();
  EXPECT_EQ(contents_of(data.layout.path), data.file);
}

TEST_F(FileSetTest, ASaveRemovesDeadWritersFilesAndKeepsLivingOnes) {
  const std::string dead = ".trunkline-0123456789abcdef.tmp";
  const auto leave_debris = [&] { std::ofstream(root_.file(dead)) << "half of it"; };
  leave_debris();
  os::remove_dead_temporary_files(root_.path());
  if (!names().empty()) GTEST_SKIP() << "nothing is removed on this filesystem";

  const Engine engine = make_engine();
  const Sample first = sample(kMiB, "first"), second = sample(kMiB, "second");
  auto set = FileSet::create(engine, {first.layout}, {});
  ASSERT_TRUE(set);
  const std::vector<std::string> living = names();
  ASSERT_EQ(living.size(), 1U);
  leave_debris();
  // Files created under their own names have no temporary ones: those who write them clean up in their own
  // way.
  ASSERT_TRUE(save(engine, {second.layout}, {.replace = false}));
  EXPECT_TRUE(std::filesystem::exists(root_.file(dead)));
  ASSERT_TRUE(save(engine, {second.layout}));
  EXPECT_EQ(names(), (std::vector<std::string>{living[0], "second"}));
  ASSERT_TRUE((*set)->stage());
  os::remove_dead_temporary_files(root_.path());
  ASSERT_TRUE((*set)->finish());
  EXPECT_EQ(names(), (std::vector<std::string>{"first", "second"}));
  EXPECT_EQ(contents_of(first.layout.path), first.file);
}

TEST_F(FileSetTest, OwnNamesMustNotExist) {
  const Engine engine = make_engine();
  const Sample data = sample(5000, "f");
  const FileSetOptions options{.replace = false};
  ASSERT_TRUE(save(engine, {data.layout}, options));
  EXPECT_EQ(contents_of(data.layout.path), data.file);
  const Status again = save(engine, {data.layout}, options);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, EEXIST);
  EXPECT_EQ(contents_of(data.layout.path), data.file);
}

TEST_F(FileSetTest, OthersNeverHaveMoreAccessThanToTheReplacedFile) {
  const Engine engine = make_engine();
  const Sample data = sample(5000, "f");
  const auto mode_of = [&](const std::string& name) {
    struct stat status{};
    EXPECT_EQ(::stat(root_.file(name).c_str(), &status), 0);
    return status.st_mode & 07777;
  };
  const mode_t before = ::umask(027);
  for (const mode_t mode : {0640U, 0600U, 0604U, 0666U, 0200U}) {
    std::ofstream(root_.file("f")) << "old";
    ASSERT_EQ(::chmod(root_.file("f").c_str(), mode), 0);
    auto set = FileSet::create(engine, {data.layout}, {});
    ASSERT_TRUE(set) << set.error().message;
    const std::vector<std::string> found = names();
    ASSERT_EQ(found.size(), 2U);
    EXPECT_EQ(mode_of(found[0] == "f" ? found[1] : found[0]), 0600U);
    ASSERT_TRUE((*set)->stage());
    ASSERT_TRUE((*set)->finish());
    EXPECT_EQ(mode_of("f"), mode);
    ASSERT_EQ(::unlink(root_.file("f").c_str()), 0);
  }
  ASSERT_TRUE(save(engine, {data.layout}));
  EXPECT_EQ(mode_of("f"), 0640U) << "a new file";
  ::umask(before);
}

TEST_F(FileSetTest, ChangesDuringTheSaveAreRespected) {
  const Engine engine = make_engine();
  const Sample data = sample(5000, "f");
  const auto begin = [&] {
    std::ofstream(root_.file("f")) << "old";
    EXPECT_EQ(::chmod(root_.file("f").c_str(), 0644), 0);
    auto set = FileSet::create(engine, {data.layout}, {});
    EXPECT_TRUE(set && (*set)->stage());
    return std::move(*set);
  };
  auto withdrawn = begin();
  ASSERT_EQ(::chmod(root_.file("f").c_str(), 0600), 0);
  ASSERT_TRUE(withdrawn->finish());
  struct stat status{};
  ASSERT_EQ(::stat(root_.file("f").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600U);

  auto removed = begin();
  ASSERT_EQ(::chmod(root_.file("f").c_str(), 0600), 0);
  ASSERT_EQ(::unlink(root_.file("f").c_str()), 0);
  ASSERT_TRUE(removed->finish());
  ASSERT_EQ(::stat(root_.file("f").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600U);

  auto displaced = begin();
  ASSERT_EQ(::unlink(root_.file("f").c_str()), 0);
  std::filesystem::create_directory(root_.file("f"));
  const Status finished = displaced->finish();
  ASSERT_FALSE(finished);
  EXPECT_EQ(finished.error().code, EISDIR);
  EXPECT_EQ(names(), std::vector<std::string>{"f"});
}

TEST_F(FileSetTest, LinksAreFollowedAndOnlyRegularFilesAccepted) {
  const Engine engine = make_engine();
  const Sample data = sample(5000, "link");
  ASSERT_EQ(::symlink(root_.file("real").c_str(), root_.file("link").c_str()), 0);
  ASSERT_TRUE(save(engine, {data.layout}));
  EXPECT_EQ(contents_of(root_.file("real")), data.file);
  EXPECT_TRUE(std::filesystem::is_symlink(root_.file("link")));

  std::filesystem::create_directory(root_.file("d"));
  ASSERT_EQ(::mkfifo(root_.file("p").c_str(), 0600), 0);
  const auto refused = [&](const std::string& path) {
    FileLayout layout = data.layout;
    layout.path = path;
    const Status status = save(engine, {layout});
    EXPECT_FALSE(status) << path;
    return status ? Error{} : status.error();
  };
  EXPECT_EQ(refused(root_.file("d")).code, EISDIR);
  EXPECT_EQ(refused(root_.file("p")).kind, ErrorKind::unsupported);
  EXPECT_EQ(refused(root_.file("none/f")).code, ENOENT);
  EXPECT_EQ(names(), (std::vector<std::string>{"d", "link", "p", "real"}));
}

}  // namespace
}  // namespace trunkline::tensor_file
