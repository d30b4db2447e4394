#include "os/file_lock.h"

#include <gtest/gtest.h>

#include <thread>

#include "os/unique_fd.h"
#include "support/sanitizers.h"
#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

class FileLockTest : public testing::Test {
 protected:
  UniqueFd open(int flags) const {
    return UniqueFd(::open(path_.c_str(), flags | O_CREAT | O_CLOEXEC, 0600));
  }

  test::TempDirectory directory_;
  std::string path_ = directory_.file("a");
};

TEST_F(FileLockTest, AnExclusiveLockExcludesOthersWhoOpenTheFile) {
  const UniqueFd mine = open(O_RDWR);
  const UniqueFd theirs = open(O_RDWR);
  int shared = 0;  // a plain int: only the lock synchronizes the two
  const auto count = [&shared](const UniqueFd& fd) {
    for (int round = 0; round < 5000; ++round) {
      const FileLock lock(fd.get(), FileLock::Kind::exclusive);
      if (!lock.held()) return;
      const volatile int before = shared;
      shared = before + 1;
    }
  };
  if (!FileLock(mine.get(), FileLock::Kind::exclusive).held())
    GTEST_SKIP() << "the filesystem of the temporary directory has no locks";
  if (test::kUnderThreadSanitizer) GTEST_SKIP() << "the thread sanitizer does not know file locks";
  std::thread other([&] { count(theirs); });
  count(mine);
  other.join();
  EXPECT_EQ(shared, 10'000);
}

TEST_F(FileLockTest, SharedLocksAreHeldTogether) {
  const UniqueFd mine = open(O_RDONLY);
  const UniqueFd theirs = open(O_RDONLY);
  const FileLock lock(mine.get(), FileLock::Kind::shared);
  const FileLock other(theirs.get(), FileLock::Kind::shared);
  EXPECT_EQ(lock.held(), other.held());
}

TEST_F(FileLockTest, AHeldLockIsBusyWithoutWaiting) {
  using Wait = FileLock::Wait;
  const UniqueFd mine = open(O_RDWR);
  const UniqueFd theirs = open(O_RDWR);
  {
    const FileLock lock(mine.get(), FileLock::Kind::exclusive, Wait::never);
    if (!lock.held()) GTEST_SKIP() << "the filesystem of the temporary directory has no locks";
    const FileLock other(theirs.get(), FileLock::Kind::exclusive, Wait::never);
    EXPECT_FALSE(other.held());
    EXPECT_TRUE(other.busy());
    EXPECT_TRUE(FileLock(theirs.get(), FileLock::Kind::shared, Wait::never).busy());
  }
  const FileLock other(theirs.get(), FileLock::Kind::exclusive, Wait::never);
  EXPECT_TRUE(other.held());
  EXPECT_FALSE(other.busy());
  EXPECT_FALSE(FileLock(-1, FileLock::Kind::shared, Wait::never).busy());
}

TEST_F(FileLockTest, AnUnsupportedLockIsNotHeld) {
  const UniqueFd reader = open(O_RDONLY);
  EXPECT_FALSE(FileLock(reader.get(), FileLock::Kind::exclusive).held());
  EXPECT_FALSE(FileLock(-1, FileLock::Kind::shared).held());
}

}  // namespace
}  // namespace trunkline::os
