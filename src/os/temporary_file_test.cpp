#include "os/temporary_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "os/durable.h"
#include "os/unique_fd.h"
#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

using test::TempDirectory;

class TemporaryFileTest : public testing::Test {
 protected:
  // These tests need a filesystem on which temporary files are removed.
  void SetUp() override {
    const std::string dead = make_dead();
    remove_dead_temporary_files(directory_.path());
    if (std::filesystem::exists(dead)) GTEST_SKIP() << "nothing is removed on this filesystem";
  }

  std::string make_dead() const {
    std::string path = temporary_name(directory_.path());
    std::ofstream(path) << "half of it";
    return path;
  }

  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path()))
      found.insert(entry.path().filename().string());
    return found;
  }

  TempDirectory directory_;
};

TEST_F(TemporaryFileTest, AFileWithoutAWriterIsRemoved) {
  make_dead();
  make_dead();
  remove_dead_temporary_files(directory_.path());
  EXPECT_TRUE(names().empty());
}

TEST_F(TemporaryFileTest, AClaimedFileStaysUntilTheClaimEnds) {
  const std::string path = temporary_name(directory_.path());
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  {
    const WriterClaim claim(fd.get());
    EXPECT_FALSE(claim.lost());
    remove_dead_temporary_files(directory_.path());
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  remove_dead_temporary_files(directory_.path());
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_TRUE(WriterClaim(fd.get()).lost()) << "it was removed between creation and claim";
}

TEST_F(TemporaryFileTest, AClaimHasOneHolderAtATime) {
  const std::string path = make_dead();
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  {
    const WriterClaim claim(fd.get());
    EXPECT_EQ(DeadWriter::find(path), nullptr);
  }
  const auto dead = DeadWriter::find(path);
  ASSERT_NE(dead, nullptr);
  EXPECT_TRUE(WriterClaim(fd.get()).lost()) << "the one that removes it holds it until it is gone";
  EXPECT_EQ(DeadWriter::find(path), nullptr) << "and nobody else";
  EXPECT_EQ(DeadWriter::find(directory_.file("none")), nullptr);
  EXPECT_EQ(DeadWriter::find(directory_.path()), nullptr);
}

TEST_F(TemporaryFileTest, AClaimIsLostToOneWhoRemovesTheFile) {
  const std::string path = make_dead();
  const UniqueFd mine(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  const UniqueFd theirs(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  const FileLock lock(theirs.get(), FileLock::Kind::exclusive);
  EXPECT_TRUE(WriterClaim(mine.get()).lost());
}

TEST_F(TemporaryFileTest, OnlyFilesWithExactlySuchANameAreRemoved) {
  const std::vector<std::string> foreign{
      ".trunkline-0123456789abcde.tmp",  ".trunkline-0123456789abcdef0.tmp",
      ".trunkline-0123456789abcdeF.tmp", ".trunkline-0123456789abcdeg.tmp",
      "trunkline-0123456789abcdef.tmp",  ".trunkline-0123456789abcdef.tmp~",
      ".trunkline-0123456789abcdef",     "model.pt"};
  for (const std::string& name : foreign) {
    EXPECT_FALSE(is_temporary_name(name)) << name;
    std::ofstream(directory_.file(name)) << "x";
  }
  // Not regular files, but with such a name.
  const std::string folder = ".trunkline-0000000000000001.tmp", link = ".trunkline-0000000000000002.tmp",
                    pipe = ".trunkline-0000000000000003.tmp";
  std::filesystem::create_directory(directory_.file(folder));
  std::filesystem::create_symlink("model.pt", directory_.file(link));
  ASSERT_EQ(::mkfifo(directory_.file(pipe).c_str(), 0600), 0);
  remove_dead_temporary_files(directory_.path());
  std::set<std::string> expected(foreign.begin(), foreign.end());
  expected.insert({folder, link, pipe});
  EXPECT_EQ(names(), expected);
}

TEST_F(TemporaryFileTest, APathThatIsNotADirectoryIsIgnored) {
  remove_dead_temporary_files(directory_.file("none"));
  std::ofstream(directory_.file("file")) << "x";
  remove_dead_temporary_files(directory_.file("file"));
  EXPECT_EQ(names(), std::set<std::string>{"file"});
}

// Writers are scanned continuously: none ever finds its file removed.
TEST_F(TemporaryFileTest, RemovalNeverHitsALiveWriter) {
  std::atomic<bool> over{false};
  std::vector<std::thread> others;
  for (int i = 0; i < 2; ++i) {
    others.emplace_back([&] {
      while (!over) remove_dead_temporary_files(directory_.path());
    });
  }
  for (int round = 0; round < 200; ++round) {
    const std::string text = std::to_string(round);
    const auto written = write_file_durably(directory_.file("a"), text);
    EXPECT_TRUE(written) << written.error().message;
    std::string found;
    std::ifstream(directory_.file("a")) >> found;
    EXPECT_EQ(found, text);
    if (round % 10 == 0) make_dead();
  }
  over = true;
  for (std::thread& other : others) other.join();
  remove_dead_temporary_files(directory_.path());
  EXPECT_EQ(names(), std::set<std::string>{"a"});
}

TEST_F(TemporaryFileTest, SavesListADirectoryOfFewFilesEachTime) {
  for (int round = 0; round < 3; ++round) {
    make_dead();
    remove_dead_temporary_files_sometimes(directory_.path());
    EXPECT_TRUE(names().empty());
  }
}

}  // namespace
}  // namespace trunkline::os
