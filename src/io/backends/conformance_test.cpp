// The contract of every backend, tested directly and under the fault decorator.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <thread>

#include "io/backends/backend.h"
#include "io/backends/faulty.h"
#include "os/unique_fd.h"
#include "support/engines.h"
#include "support/temp_directory.h"
#include "support/test_memory.h"

namespace trunkline::io {
namespace {

struct Variant {
  BackendKind kind;
  bool decorated;
};

class BackendTest : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    auto backend = make_backend(GetParam().kind, kDepth);
    if (!backend) GTEST_SKIP() << backend.error().message;
    backend_ = GetParam().decorated ? plan_->decorate(std::move(*backend)) : std::move(*backend);
    fd_.reset(::open(directory_.file("data").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    ASSERT_TRUE(fd_.valid());
  }

  // Runs commands until all are complete; returns their results by tag.
  std::map<std::uint32_t, std::int64_t> run(const std::vector<Command>& commands, unsigned wanted = 1) {
    for (const Command& command : commands) backend_->push(command);
    std::map<std::uint32_t, std::int64_t> results;
    std::vector<Completion> completions;
    while (results.size() < commands.size()) {
      completions.clear();
      backend_->reap(completions, wanted);
      for (const Completion& completion : completions) {
        EXPECT_FALSE(results.contains(completion.tag)) << "completed twice";
        results[completion.tag] = completion.result;
      }
    }
    return results;
  }

  Command command(Op op, std::byte* data, std::uint64_t length, std::uint64_t offset,
                  std::uint32_t tag) const {
    Command made;
    made.op = op;
    made.fd = fd_.get();
    made.data = data;
    made.length = length;
    made.offset = offset;
    made.tag = tag;
    return made;
  }

  static constexpr unsigned kDepth = 16;
  test::TempDirectory directory_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  std::unique_ptr<Backend> backend_;
  os::UniqueFd fd_;
};

TEST_P(BackendTest, WritesSyncsAndReadsAFullQueue) {
  test::TestMemory written(kDepth * 4096);
  test::TestMemory read(kDepth * 4096);
  test::fill_random(written.span(), 1);
  std::vector<Command> writes;
  std::vector<Command> reads;
  for (std::uint32_t tag = 0; tag < kDepth; ++tag) {
    writes.push_back(command(Op::write, written.data() + tag * 4096, 4096, tag * 4096, tag));
    reads.push_back(command(Op::read, read.data() + tag * 4096, 4096, tag * 4096, tag));
  }
  for (unsigned round = 0; round < 50; ++round) {
    const unsigned wanted = 1 + round % kDepth;
    for (const auto& [tag, result] : run(writes, wanted)) EXPECT_EQ(result, 4096) << tag;
    EXPECT_EQ(run({command(Op::sync, nullptr, 0, 0, 3)}).at(3), 0);
    for (const auto& [tag, result] : run(reads, wanted)) EXPECT_EQ(result, 4096) << tag;
    ASSERT_EQ(std::memcmp(written.data(), read.data(), read.size()), 0);
    std::memset(read.data(), 0, read.size());
  }
}

TEST_P(BackendTest, ReportsTheKernelsErrors) {
  test::TestMemory memory(4096);
  ASSERT_EQ(::ftruncate(fd_.get(), 100), 0);
  EXPECT_EQ(run({command(Op::read, memory.data(), 4096, 0, 0)}).at(0), 100);
  EXPECT_EQ(run({command(Op::read, memory.data(), 4096, 100, 0)}).at(0), 0);
  Command bad = command(Op::read, memory.data(), 4096, 0, 1);
  const os::UniqueFd closed(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  bad.fd = closed.get();
  EXPECT_EQ(run({bad}).at(1), -EBADF);
  EXPECT_EQ(run({command(Op::read, memory.data(), 4096, 0, 2), bad}).at(1), -EBADF);
}

TEST_P(BackendTest, AWakeEndsTheWait) {
  std::vector<Completion> completions;
  backend_->wake();
  backend_->reap(completions, 1);  // woken before it started
  EXPECT_TRUE(completions.empty());
  for (int round = 0; round < 20; ++round) {
    std::thread other([this] { backend_->wake(); });
    backend_->reap(completions, 1);
    other.join();
    EXPECT_TRUE(completions.empty());
  }
}

TEST_P(BackendTest, FewerThanWantedAreDeliveredAnyway) {
  test::TestMemory memory(4096);
  const std::vector<Command> alone = {command(Op::write, memory.data(), 4096, 0, 5)};
  EXPECT_EQ(run(alone, kDepth).at(5), 4096);  // the others will never come
  std::vector<Completion> completions;
  backend_->wake();
  backend_->reap(completions, kDepth);
  EXPECT_TRUE(completions.empty());
}

TEST_P(BackendTest, RegisteredMemoryWorksOrIsRejectedWithAReason) {
  test::TestMemory memory(8 * 4096);
  const Status status = backend_->register_memory(memory.span());
  if (!status) {
    EXPECT_FALSE(status.error().message.empty());
    return;
  }
  test::fill_random(memory.span(), 2);
  Command write = command(Op::write, memory.data() + 4096, 4096, 0, 0);
  write.registered = true;
  EXPECT_EQ(run({write}).at(0), 4096);
  Command read = command(Op::read, memory.data() + 3 * 4096, 4096, 0, 0);
  read.registered = true;
  EXPECT_EQ(run({read}).at(0), 4096);
  EXPECT_EQ(std::memcmp(memory.data() + 4096, memory.data() + 3 * 4096, 4096), 0);
}

std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const BackendKind kind : test::all_backends()) {
    all.push_back({kind, false});
    all.push_back({kind, true});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Every, BackendTest, testing::ValuesIn(variants()), [](const auto& variant) {
  return std::string(to_string(variant.param.kind)) + (variant.param.decorated ? "_decorated" : "");
});

}  // namespace
}  // namespace trunkline::io
