#include "os/replacement_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <utility>

#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

namespace fs = std::filesystem;

std::string read(const std::string& path) {
  std::ifstream stream(path);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void write(const std::string& path, std::string_view contents) { std::ofstream(path) << contents; }

std::size_t files_in(const std::string& directory) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(directory), {}));
}

mode_t mode_of(const std::string& path) {
  struct stat status{};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return status.st_mode & 07777;
}

class ReplacementFileTest : public testing::Test {
 protected:
  const test::TempDirectory directory_;
  const std::string path_ = directory_.file("model.bin");
};

TEST_F(ReplacementFileTest, ReplacesTheOldContentsAtTheEndOnly) {
  write(path_, "old");
  auto file = ReplacementFile::create(path_);
  ASSERT_TRUE(file);
  ASSERT_TRUE(file->write("ne"));
  ASSERT_TRUE(file->write("w"));
  EXPECT_EQ(read(path_), "old");
  EXPECT_EQ(*file->finish(), directory_.path());
  EXPECT_EQ(read(path_), "new");
  EXPECT_EQ(files_in(directory_.path()), 1U);
}

TEST_F(ReplacementFileTest, LeavesNothingBehindWithoutFinish) {
  write(path_, "old");
  {
    auto file = ReplacementFile::create(path_);
    ASSERT_TRUE(file && file->write("half"));
    EXPECT_EQ(files_in(directory_.path()), 2U);
  }
  EXPECT_EQ(files_in(directory_.path()), 1U);
  EXPECT_EQ(read(path_), "old");
}

TEST_F(ReplacementFileTest, BelongsToWhereItWasMoved) {
  std::optional<ReplacementFile> moved;
  {
    auto file = ReplacementFile::create(path_);
    ASSERT_TRUE(file);
    moved.emplace(std::move(*file));
  }
  EXPECT_EQ(files_in(directory_.path()), 1U);
  ASSERT_TRUE(moved->write("new") && moved->finish());
  EXPECT_EQ(read(path_), "new");
}

TEST_F(ReplacementFileTest, FailsWhereTheNameIsUsedMeanwhile) {
  {
    auto file = ReplacementFile::create(path_, IfPresent::fail);
    ASSERT_TRUE(file && file->write("ours"));
    write(path_, "theirs");
    const auto finished = file->finish();
    ASSERT_FALSE(finished);
    EXPECT_EQ(finished.error().code, EEXIST);
  }
  EXPECT_EQ(read(path_), "theirs");
  EXPECT_EQ(files_in(directory_.path()), 1U);
}

TEST_F(ReplacementFileTest, KeepsModeAndAttributesAndFollowsLinks) {
  write(path_, "old");
  ASSERT_EQ(::chmod(path_.c_str(), 0640), 0);
  const bool has_attributes = ::setxattr(path_.c_str(), "user.origin", "here", 4, 0) == 0;
  const std::string link = directory_.file("link");
  fs::create_symlink("model.bin", link);
  auto file = ReplacementFile::create(link);
  ASSERT_TRUE(file);
  EXPECT_TRUE(fs::equivalent(file->path(), path_));
  ASSERT_TRUE(file->write("new") && file->finish());
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(read(path_), "new");
  EXPECT_EQ(mode_of(path_), 0640U);
  if (has_attributes) {
    char value[8]{};
    EXPECT_EQ(::getxattr(path_.c_str(), "user.origin", value, sizeof value), 4);
  }
}

TEST_F(ReplacementFileTest, RejectsLinksOfProcToFilesWithoutAName) {
  write(path_, "old");
  const int fd = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  auto named = ReplacementFile::create(link);
  ASSERT_TRUE(named && named->write("new") && named->finish());
  EXPECT_EQ(read(path_), "new");
  // The open file has lost its name by that.
  for (const bool has_other_name : {true, false}) {
    if (!has_other_name) fs::remove(path_);
    const auto failed = ReplacementFile::create(link);
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(failed.error().message.find("pass the open file itself"), std::string::npos)
        << failed.error().message;
  }
  EXPECT_EQ(files_in(directory_.path()), 0U);
  ::close(fd);
}

TEST_F(ReplacementFileTest, IsNeverReadableByMoreThanTheOldFile) {
  write(path_, "secret");
  ASSERT_EQ(::chmod(path_.c_str(), 0600), 0);
  auto file = ReplacementFile::create(path_);
  ASSERT_TRUE(file);
  struct stat status{};
  ASSERT_EQ(::fstat(file->fd(), &status), 0);
  EXPECT_EQ(status.st_mode & 0077, 0U);
}

TEST_F(ReplacementFileTest, PublishesNothingElseUnderItsTemporaryName) {
  write(path_, "old");
  auto file = ReplacementFile::create(path_);
  ASSERT_TRUE(file && file->write("new"));
  for (const auto& entry : fs::directory_iterator(directory_.path())) {
    if (entry.path() == path_) continue;
    fs::remove(entry.path());
    write(entry.path(), "not ours");
  }
  EXPECT_FALSE(file->finish());
  EXPECT_EQ(read(path_), "old");
}

TEST_F(ReplacementFileTest, StaysWhenAForkedChildEnds) {
  auto file = ReplacementFile::create(path_);
  ASSERT_TRUE(file && file->write("new"));
  const pid_t child = ::fork();
  if (child == 0) {
    {
      const ReplacementFile copy(std::move(*file));
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(file->finish());
  EXPECT_EQ(read(path_), "new");
}

}  // namespace
}  // namespace trunkline::os
