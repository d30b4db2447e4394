#include "os/fork_private_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "os/file_lock.h"
#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

constexpr mode_t kMode = 0600;

bool locked(const std::string& path) {
  const ForkPrivateFd fd(path, O_RDWR, kMode);
  return FileLock(fd.get(), FileLock::Kind::exclusive, FileLock::Wait::never).busy();
}

template <class Body>
int exit_code_of_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ForkPrivateFd, IsClosedOnlyInAForkedChild) {
  const test::TempDirectory scratch;
  const std::string path = scratch.file("lock");
  auto first = std::make_unique<ForkPrivateFd>(path, O_RDWR | O_CREAT, kMode);
  const ForkPrivateFd second(path, O_RDWR, kMode);
  const ForkPrivateFd third(path, O_RDWR, kMode);
  first.reset();  // the last entry of the list
  const int number = second.get();
  EXPECT_EQ(exit_code_of_child([&] {
              const bool closed = ::fcntl(number, F_GETFD) < 0 && errno == EBADF;
              return closed && !second.valid() && !third.valid() ? 0 : 1;
            }),
            0);
  EXPECT_TRUE(second.valid());
  EXPECT_EQ(second.open_error(), 0);
  EXPECT_GE(::fcntl(number, F_GETFD), 0);
}

TEST(ForkPrivateFd, ReportsWhyItIsNotOpen) {
  const test::TempDirectory scratch;
  const ForkPrivateFd fd(scratch.file("missing/lock"), O_RDWR, kMode);
  EXPECT_FALSE(fd.valid());
  EXPECT_EQ(fd.open_error(), ENOENT);
}

TEST(ForkPrivateFd, AForkedChildNeitherKeepsNorReleasesALock) {
  const test::TempDirectory scratch;
  const std::string path = scratch.file("lock");
  auto fd = std::make_unique<ForkPrivateFd>(path, O_RDWR | O_CREAT, kMode);
  auto lock = std::make_unique<FileLock>(fd->get(), FileLock::Kind::exclusive);
  EXPECT_EQ(exit_code_of_child([&] {
              lock.reset();
              return locked(path) ? 0 : 1;
            }),
            0);
  EXPECT_TRUE(locked(path));
  lock.reset();
  EXPECT_FALSE(locked(path));
}

}  // namespace
}  // namespace trunkline::os
