// Forces the fallback from one backend to the next: whatever a kernel or a container denies selects the next
// backend, and explain() reports it.
//
// A seccomp filter stays in force for the life of a process, so each case runs in its own process: this
// program again, with the case in its environment.
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "support/sanitizers.h"
#include "support/temp_directory.h"
#include "support/test_memory.h"
#include "trunkline/trunkline.h"

extern char** environ;

namespace trunkline {
namespace {

constexpr const char* kCaseVariable = "TRUNKLINE_FALLBACK_CASE";

// The sanitizers replace mlock(2) by a function that does nothing and succeeds.
constexpr bool kMlockIsReal = !test::kUnderAddressSanitizer && !test::kUnderThreadSanitizer;

void deny(std::vector<unsigned> calls, int code) {
  std::vector<sock_filter> program = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const unsigned call : calls) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(code)));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  sock_fprog filter{.len = static_cast<unsigned short>(program.size()), .filter = program.data()};
  ASSERT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0) << std::strerror(errno);
}

void drop_capabilities() {
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> none{};
  ASSERT_EQ(::syscall(SYS_capset, &header, none.data()), 0);
}

// Moves bytes at every alignment, so that the engine must bounce.
void expect_works(const Engine& engine, const std::string& path) {
  auto file = File::open(engine, path, {.mode = Mode::write});
  ASSERT_TRUE(file) << file.error().message;
  test::TestMemory memory(5 * kMiB + 3, 64);
  test::fill_random(memory.span(), 1);
  auto written = file->pwrite(memory.view(), 1);
  ASSERT_TRUE(written) << written.error().message;
  ASSERT_TRUE(file->sync());
  test::TestMemory back(memory.size(), 64);
  auto read = file->pread(back.view(), 1);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(std::memcmp(memory.data(), back.data(), memory.size()), 0);
}

std::string why_refused(const Explanation& explanation, std::string_view what) {
  const auto found = std::ranges::find(explanation.refused, what, &Refusal::what);
  return found == explanation.refused.end() ? "" : found->why;
}

void expect_fallback(std::string_view backend, std::string_view refused, std::string_view reason) {
  const test::TempDirectory directory;
  auto engine = Engine::create();
  ASSERT_TRUE(engine) << engine.error().message;
  EXPECT_EQ(to_string(engine->config().backend), backend);
  expect_works(*engine, directory.file("a"));
  const auto explanation = engine->explain(directory.path());
  ASSERT_TRUE(explanation) << explanation.error().message;
  EXPECT_EQ(explanation->backend, backend);
  EXPECT_NE(why_refused(*explanation, refused).find(reason), std::string::npos)
      << why_refused(*explanation, refused);
}

void expect_forced_refusal(BackendKind kind) {
  const auto engine = Engine::create({.backend = kind});
  ASSERT_FALSE(engine);
  EXPECT_EQ(engine.error().kind, ErrorKind::unsupported);
}

void run_case(const std::string& name) {
  if (name == "io_uring_denied") {
    deny({SYS_io_uring_setup}, EPERM);
    expect_fallback("libaio", "io_uring", "EPERM");
    expect_forced_refusal(BackendKind::io_uring);
  } else if (name == "io_uring_absent") {
    deny({SYS_io_uring_setup}, ENOSYS);
    expect_fallback("libaio", "io_uring", "ENOSYS");
  } else if (name == "io_uring_set_up_but_not_entered") {
    // A filter that forgets one of the three calls: only an operation reveals it.
    deny({SYS_io_uring_enter}, EPERM);
    expect_fallback("libaio", "io_uring", "EPERM");
  } else if (name == "both_denied") {
    deny({SYS_io_uring_setup, SYS_io_setup}, EPERM);
    expect_fallback("threads", "libaio", "EPERM");
    expect_forced_refusal(BackendKind::libaio);
  } else if (name == "memory_lock_too_small") {
    drop_capabilities();
    const rlimit small{.rlim_cur = 64 * 1024, .rlim_max = 64 * 1024};
    ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &small), 0);
    const test::TempDirectory directory;
    auto engine = Engine::create();
    ASSERT_TRUE(engine) << engine.error().message;
    expect_works(*engine, directory.file("a"));
    const auto explanation = engine->explain(directory.path());
    ASSERT_TRUE(explanation);
    EXPECT_EQ(why_refused(*explanation, "memory lock") != "", kMlockIsReal);
    if (engine->config().backend == BackendKind::io_uring) {
      EXPECT_NE(why_refused(*explanation, "registered buffers").find("ENOMEM"), std::string::npos);
    }
    const auto buffer = engine->allocate(kMiB);
    ASSERT_TRUE(buffer);
    EXPECT_EQ(buffer->locked(), !kMlockIsReal);
  } else {
    FAIL() << "no case " << name;
  }
}

class BackendFallback : public testing::TestWithParam<const char*> {};

TEST_P(BackendFallback, EachIsUsedAndReported) {
  if (const char* name = std::getenv(kCaseVariable); name != nullptr && std::string(name) == GetParam()) {
    run_case(GetParam());
    return;
  }
  const std::string filter =
      std::string("--gtest_filter=Every/BackendFallback.EachIsUsedAndReported/") + GetParam();
  std::string variable = std::string(kCaseVariable) + "=" + GetParam();
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  environment.push_back(variable.data());
  environment.push_back(nullptr);
  std::string program = "/proc/self/exe";
  std::vector<std::string> words = {program, filter};
  std::array<char*, 3> arguments = {words[0].data(), words[1].data(), nullptr};
  pid_t child = 0;
  ASSERT_EQ(::posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments.data(), environment.data()),
            0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "see the output above";
}

INSTANTIATE_TEST_SUITE_P(Every, BackendFallback,
                         testing::Values("io_uring_denied", "io_uring_absent",
                                         "io_uring_set_up_but_not_entered", "both_denied",
                                         "memory_lock_too_small"),
                         [](const auto& each) { return std::string(each.param); });

TEST(Explain, TmpfsHasNoDirectIo) {
  const std::string path = "/dev/shm";
  if (::access(path.c_str(), W_OK) != 0) GTEST_SKIP() << "no writable tmpfs at /dev/shm";
  const Engine engine = Engine::create().value();
  const auto explanation = engine.explain(path);
  ASSERT_TRUE(explanation) << explanation.error().message;
  EXPECT_EQ(explanation->filesystem, "tmpfs");
  EXPECT_FALSE(explanation->direct);
  EXPECT_NE(why_refused(*explanation, "direct I/O"), "");
  const auto forced =
      File::open(engine, path + "/trunkline-test-forced", {.mode = Mode::write, .direct = Direct::always});
  EXPECT_EQ(forced.error().kind, ErrorKind::unsupported);
  ::unlink((path + "/trunkline-test-forced").c_str());
}

}  // namespace
}  // namespace trunkline
