#include "os/durable.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "os/read_text.h"
#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

using test::TempDirectory;

std::size_t entries(const std::string& directory) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(directory), {}));
}

TEST(WriteFileDurably, CreatesAndReplaces) {
  const TempDirectory directory;
  const std::string path = directory.file("a");
  for (const std::string& contents : {std::string("first"), std::string(), std::string(300'000, 'x')}) {
    const auto written = write_file_durably(path, contents);
    ASSERT_TRUE(written) << written.error().message;
    EXPECT_EQ(read_text(path), contents);
    EXPECT_EQ(entries(directory.path()), 1U) << "a temporary file was left";
  }
}

TEST(WriteFileDurably, ANewFileHonoursTheUmask) {
  const TempDirectory directory;
  const mode_t before = ::umask(027);
  const auto written = write_file_durably(directory.file("a"), "x");
  ::umask(before);
  ASSERT_TRUE(written) << written.error().message;
  struct stat status{};
  ASSERT_EQ(::stat(directory.file("a").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0640U);
}

TEST(WriteFileDurably, KeepsModeAndAttributesOfTheFileThatItReplaces) {
  const TempDirectory directory;
  const std::string path = directory.file("a");
  ASSERT_TRUE(write_file_durably(path, "old"));
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  const bool has_attributes = ::setxattr(path.c_str(), "user.note", "kept", 4, 0) == 0;
  const auto written = write_file_durably(path, "new");
  ASSERT_TRUE(written) << written.error().message;
  struct stat status{};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600U);
  EXPECT_EQ(read_text(path), "new");
  std::array<char, 8> note{};
  if (has_attributes) {
    EXPECT_EQ(::getxattr(path.c_str(), "user.note", note.data(), note.size()), 4);
  }
}

TEST(WriteFileDurably, FollowsLinks) {
  const TempDirectory directory;
  std::filesystem::create_directory(directory.file("d"));
  ASSERT_EQ(::symlink("d/real", directory.file("link").c_str()), 0);
  for (const std::string contents : {"created", "replaced"}) {
    const auto written = write_file_durably(directory.file("link"), contents);
    ASSERT_TRUE(written) << written.error().message;
    EXPECT_EQ(read_text(directory.file("d/real")), contents);
    EXPECT_TRUE(std::filesystem::is_symlink(directory.file("link")));
  }
  ASSERT_EQ(::symlink("loop", directory.file("loop").c_str()), 0);
  const auto looped = write_file_durably(directory.file("loop"), "x");
  ASSERT_FALSE(looped);
  EXPECT_EQ(looped.error().code, ELOOP);
}

TEST(WriteFileDurably, RejectsFilesThatMayNotBeWritten) {
  if (::geteuid() == 0) GTEST_SKIP() << "root can write every file";
  const TempDirectory directory;
  const std::string path = directory.file("a");
  ASSERT_TRUE(write_file_durably(path, "old"));
  ASSERT_EQ(::chmod(path.c_str(), 0400), 0);
  const auto written = write_file_durably(path, "new");
  ASSERT_FALSE(written);
  EXPECT_EQ(written.error().code, EACCES);
  EXPECT_EQ(read_text(path), "old");
}

TEST(WriteFileDurably, LeavesAnExistingFileAloneWhenAsked) {
  const TempDirectory directory;
  ASSERT_TRUE(write_file_durably(directory.file("a"), "old", IfPresent::fail));
  const auto written = write_file_durably(directory.file("a"), "new", IfPresent::fail);
  ASSERT_FALSE(written);
  EXPECT_EQ(written.error().code, EEXIST);
  EXPECT_EQ(read_text(directory.file("a")), "old");
  EXPECT_EQ(entries(directory.path()), 1U);
}

TEST(WriteFileDurably, AFailureLeavesNoTrace) {
  const TempDirectory directory;
  const auto missing = write_file_durably(directory.file("no/such"), "x");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ENOENT);

  std::filesystem::create_directory(directory.file("taken"));
  std::ofstream(directory.file("taken/file")) << "x";
  const auto over_directory = write_file_durably(directory.file("taken"), "x");
  ASSERT_FALSE(over_directory);
  EXPECT_EQ(over_directory.error().code, EISDIR);
  EXPECT_EQ(entries(directory.path()), 1U) << "a temporary file was left";
}

TEST(WriteFileDurably, AFailedWriteKeepsTheOldFile) {
  const TempDirectory directory;
  ASSERT_TRUE(write_file_durably(directory.file("a"), "old"));
  // A file size limit makes a write fail half way on any machine.
  struct rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_action = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small{8192, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto written = write_file_durably(directory.file("a"), std::string(100'000, 'x'));
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_action);
  ASSERT_FALSE(written);
  EXPECT_EQ(written.error().code, EFBIG);
  EXPECT_EQ(read_text(directory.file("a")), "old");
  EXPECT_EQ(entries(directory.path()), 1U) << "a temporary file was left";
}

TEST(FsyncDirectory, FailsOnWhatIsNotADirectory) {
  const TempDirectory directory;
  EXPECT_TRUE(fsync_directory(directory.path()));
  std::ofstream(directory.file("a")) << "x";
  EXPECT_EQ(fsync_directory(directory.file("a")).error().code, ENOTDIR);
  EXPECT_EQ(fsync_directory(directory.file("b")).error().code, ENOENT);
}

TEST(ReadText, StopsAtTheLimitAndNeverWaitsForAPipe) {
  const TempDirectory directory;
  ASSERT_TRUE(write_file_durably(directory.file("a"), std::string(100'000, 'x')));
  EXPECT_EQ(read_text(directory.file("a"), 70'000)->size(), 70'000U);
  EXPECT_EQ(read_text(directory.file("a"))->size(), 100'000U);
  ASSERT_EQ(::mkfifo(directory.file("pipe").c_str(), 0600), 0);
  EXPECT_EQ(read_text(directory.file("pipe")), "");
  EXPECT_EQ(read_text(directory.file("none")).error().code, ENOENT);
  EXPECT_EQ(read_text(directory.path()).error().code, EISDIR);
}

TEST(FsyncDirectory, WorksWhereTheDirectoryMayBeWrittenAndNotRead) {
  constexpr uid_t kNobody = 65534;
  const uid_t user = ::geteuid();
  const TempDirectory directory;
  ASSERT_EQ(::chmod(directory.path().c_str(), 0300), 0);
  if (user == 0) {  // who may read everything
    ASSERT_EQ(::chown(directory.path().c_str(), kNobody, static_cast<gid_t>(-1)), 0);
    ASSERT_EQ(::seteuid(kNobody), 0);
  }
  const auto written = write_file_durably(directory.file("a"), "text");
  const auto synced = fsync_directory(directory.path());
  ASSERT_EQ(::seteuid(user), 0);
  ASSERT_EQ(::chmod(directory.path().c_str(), 0700), 0);
  EXPECT_TRUE(written) << written.error().message;
  EXPECT_TRUE(synced) << synced.error().message;
  EXPECT_EQ(read_text(directory.file("a")), "text");
}

}  // namespace
}  // namespace trunkline::os
