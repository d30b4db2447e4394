#include "os/unique_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/fork_private_fd.h"

namespace trunkline::os {
namespace {

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

bool is_closed_on_exec(int fd) { return (::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0; }

// What a process started with `<&- >&- 2>&-` does, whose files would be its standard streams: 0, or the
// number of the check that failed.
int open_files_without_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::close(fd);
  const UniqueFd first(::open("/dev/null", O_RDWR | O_CLOEXEC));
  UniqueFd second;
  second.reset(::open("/dev/null", O_RDWR | O_CLOEXEC));
  const ForkPrivateFd third("/dev/null", O_RDWR, 0);
  if (first.get() <= STDERR_FILENO || !is_closed_on_exec(first.get())) return 1;
  if (second.get() <= STDERR_FILENO || !is_closed_on_exec(second.get())) return 2;
  if (third.get() <= STDERR_FILENO || !is_closed_on_exec(third.get())) return 3;
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (is_open(fd)) return 4;
  }
  return 0;
}

TEST(UniqueFd, IsNeverAStandardStream) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(open_files_without_standard_streams());
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(UniqueFd, KeepsTheErrnoOfAnOpenThatFailed) {
  const UniqueFd none(::open("/dev/null/nothing", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(errno, ENOTDIR);
  EXPECT_FALSE(none.valid());
}

}  // namespace
}  // namespace trunkline::os
