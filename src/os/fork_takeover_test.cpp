#include "os/fork_takeover.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "support/sanitizers.h"

namespace trunkline::os {
namespace {

constexpr unsigned kChildSeconds = 20;  // SIGALRM ends a child that hangs

int exit_code_in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kChildSeconds);
    ::_exit(body());
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ForkTakeover, EachChildRenewsOnce) {
  ForkTakeover owner;
  int renewed = 0;
  const auto use = [&] { owner.take_over([&] { ++renewed; }); };
  use();
  EXPECT_EQ(renewed, 0) << "it belongs to the process that created it";
  const auto child = [&] {
    use();
    use();
    if (renewed != 1) return 1;
    return exit_code_in_child([&] {
      use();
      use();
      return renewed == 2 ? 0 : 2;
    });
  };
  EXPECT_EQ(exit_code_in_child(child), 0);
  use();
  EXPECT_EQ(renewed, 0) << "a child does not change its parent's object";
}

TEST(ForkTakeover, OtherThreadsOfTheChildWaitUntilItIsRenewed) {
  if (test::kUnderThreadSanitizer)
    GTEST_SKIP() << "the thread sanitizer supports no threads in a forked child";
  ForkTakeover owner;
  const auto child = [&] {
    constexpr unsigned kThreads = 4;
    std::atomic<unsigned> arrived = 0;
    int renewed = 0;  // a plain int: only the wait synchronizes the threads
    std::atomic<unsigned> wrong = 0;
    std::vector<std::thread> threads;
    for (unsigned index = 0; index < kThreads; ++index) {
      threads.emplace_back([&] {
        ++arrived;
        owner.take_over([&] {
          while (arrived.load() < kThreads) std::this_thread::yield();
          ++renewed;
        });
        if (renewed != 1) ++wrong;
      });
    }
    for (std::thread& thread : threads) thread.join();
    return static_cast<int>(wrong.load());
  };
  EXPECT_EQ(exit_code_in_child(child), 0);
}

}  // namespace
}  // namespace trunkline::os
