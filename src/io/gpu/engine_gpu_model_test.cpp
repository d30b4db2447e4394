// Compares files and GPU memory with a simple model, vectors of bytes. On every backend, with and without
// disturbed completions.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <tuple>

#include "io/gpu/gpu_fixture.h"
#include "support/engines.h"

namespace trunkline {
namespace {

using test::GpuMemory;
using test::GpuStream;
using test::GpuTest;
using test::random_bytes;

class GpuModelTest : public GpuTest,
                     public testing::WithParamInterface<std::tuple<BackendKind, bool, Direct, bool>> {
 protected:
  void SetUp() override {
    const auto [kind, disturbed, direct, with_cufile] = GetParam();
    if (with_cufile) ::setenv("TRUNKLINE_CUFILE", FAKE_CUDA_LIBRARY, 1);  // NOLINT(concurrency-mt-unsafe)
    EngineOptions options{.backend = kind,
                          .lanes = 2,
                          .queue_depth = 8,
                          .block_bytes = 64 * kKiB,
                          .pinned_budget_bytes = 16 * kMiB};
    if (disturbed) {
      options.faults = Faults::create();
      options.faults->disturb(11, 0.1, 0.3);
    }
    auto made = Engine::create(options);
    if (!made) GTEST_SKIP() << made.error().message;
    engine_ = *made;
    open_.direct = direct;
    if (!with_cufile) return;
    // Probes run at the first transfer between a filesystem and a device.
    for (const unsigned ordinal : {0, 1}) {
      const GpuMemory memory(8192, ordinal);
      ASSERT_TRUE(file(engine_, random_bytes(8192, 1), open_).pread(memory.view(), 0));
    }
    fakeCudaReset();
  }
  void TearDown() override {
    ::unsetenv("TRUNKLINE_CUFILE");  // NOLINT(concurrency-mt-unsafe)
    // Checks that the parameters took effect: the I/O paths differ.
    const auto [kind, disturbed, direct, with_cufile] = GetParam();
    const auto explanation = engine_.valid() ? engine_.explain(directory_.path()) : Result<Explanation>();
    const bool expected = with_cufile && explanation && explanation->direct;
    EXPECT_EQ(engine_.valid() && engine_.stats().bytes_gds > 0, expected);
  }

  Engine engine_;
  OpenOptions open_;
};

TEST_P(GpuModelTest, RandomReadsAndWritesMatch) {
  const File under_test = file(engine_, {}, open_);
  constexpr std::size_t kMemory = 400'000;
  constexpr std::uint64_t kMaxOffset = 500'000;
  const GpuMemory memory(kMemory);
  std::vector<std::byte> on_device = random_bytes(kMemory, 1);
  memory.set(on_device);
  std::vector<std::byte> in_file;
  std::mt19937_64 random(29);
  for (int round = 0; round < 120; ++round) {
    std::uint64_t offset = random() % kMaxOffset;
    if (random() % 3 == 0) offset = offset / 4096 * 4096;
    std::uint64_t length = random() % (random() % 2 == 0 ? 9000 : 300'000);
    if (random() % 3 == 0) length = length / 4096 * 4096;
    const std::uint64_t at = random() % (kMemory - length);
    const MemoryView view = memory.view(at, length);
    if (random() % 2 == 0) {
      auto written = random() % 2 == 0 ? under_test.pwrite(view, offset)
                                       : under_test.async_pwrite(view, offset).result();
      ASSERT_TRUE(written) << written.error().message;
      if (length > 0) {
        in_file.resize(std::max<std::size_t>(in_file.size(), offset + length));
        std::memcpy(in_file.data() + offset, on_device.data() + at, length);
      }
    } else {
      auto read =
          random() % 2 == 0 ? under_test.pread(view, offset) : under_test.async_pread(view, offset).result();
      if (offset + length <= in_file.size() || length == 0) {
        ASSERT_TRUE(read) << read.error().message;
        if (length > 0) std::memcpy(on_device.data() + at, in_file.data() + offset, length);
      } else {
        ASSERT_FALSE(read);
        ASSERT_EQ(read.error().kind, ErrorKind::end_of_file);
        on_device = memory.contents();  // this range may hold anything now
      }
    }
    if (round % 10 == 0) {
      ASSERT_EQ(memory.contents(), on_device);
    }
  }
  EXPECT_EQ(memory.contents(), on_device);
  EXPECT_EQ(contents(under_test), in_file);
  EXPECT_EQ(fakeCudaPageableCopies(), 0U);
}

// Many concurrent operations, on two devices and behind two streams, some of them cancelled. Each round gives
// every region of the file and of the memory to at most one operation, so that the model knows the outcome
// regardless of the order in which they run.
TEST_P(GpuModelTest, ConcurrentOperationsMatch) {
  constexpr std::size_t kRegions = 8;
  constexpr std::size_t kRegion = 90'000;
  struct Sent {
    Future future;
    Op op;
    std::size_t file_region;
    std::size_t memory_region;
    std::size_t in_file;  // both within their region
    std::size_t in_memory;
    std::size_t length;
    bool cancelled;
  };
  const File under_test = file(engine_, random_bytes(kRegions * kRegion, 2), open_);
  std::vector<std::byte> in_file = contents(under_test);
  const GpuMemory memories[] = {GpuMemory(kRegions * kRegion, 0), GpuMemory(kRegions * kRegion, 1)};
  const GpuStream streams[] = {GpuStream(0), GpuStream(1)};
  std::vector<std::byte> on_device[] = {random_bytes(kRegions * kRegion, 3),
                                        random_bytes(kRegions * kRegion, 4)};
  for (const std::size_t device : {0, 1}) memories[device].set(on_device[device]);
  std::mt19937_64 random(31);
  fakeCudaDelayUpTo(400);
  for (int round = 0; round < 20; ++round) {
    std::array<std::size_t, kRegions> file_regions{};
    std::array<std::size_t, kRegions> memory_regions{};
    std::iota(file_regions.begin(), file_regions.end(), 0);
    std::iota(memory_regions.begin(), memory_regions.end(), 0);
    std::ranges::shuffle(file_regions, random);
    std::ranges::shuffle(memory_regions, random);
    std::vector<Sent> all;
    for (std::size_t index = 0; index < kRegions; ++index) {
      Sent sent{.future = {},
                .op = random() % 2 == 0 ? Op::read : Op::write,
                .file_region = file_regions[index],
                .memory_region = memory_regions[index],
                .in_file = random() % 3 == 0 ? 0 : random() % (kRegion / 2),
                .in_memory = random() % 3 == 0 ? 0 : random() % (kRegion / 2),
                .length = 1 + random() % (kRegion / 2),
                .cancelled = random() % 6 == 0};
      const std::size_t device = sent.memory_region % 2;
      const std::size_t at = sent.memory_region * kRegion + sent.in_memory;
      void* stream = nullptr;
      if (random() % 2 == 0) {  // work that the operation must come after
        stream = streams[device].handle();
        const auto value = static_cast<unsigned char>(random());
        ASSERT_EQ(fakeCudaFill(memories[device].address() + at, sent.length, value, stream), 0);
        std::fill_n(on_device[device].begin() + static_cast<std::ptrdiff_t>(at), sent.length,
                    std::byte{value});
      }
      const MemoryView view = memories[device].view(at, sent.length, stream);
      const std::uint64_t offset = sent.file_region * kRegion + sent.in_file;
      sent.future =
          sent.op == Op::read ? under_test.async_pread(view, offset) : under_test.async_pwrite(view, offset);
      all.push_back(sent);
    }
    for (Sent& sent : all) {
      if (sent.cancelled) sent.future.cancel();
    }
    for (Sent& sent : all) {
      const std::size_t device = sent.memory_region % 2;
      const std::size_t at = sent.memory_region * kRegion + sent.in_memory;
      const std::size_t offset = sent.file_region * kRegion + sent.in_file;
      std::byte* of_memory = on_device[device].data() + at;
      std::byte* of_file = in_file.data() + offset;
      const auto result = sent.future.result();
      if (!result) {
        ASSERT_TRUE(sent.cancelled) << result.error().message;
        ASSERT_EQ(result.error().kind, ErrorKind::cancelled) << result.error().message;
      } else if (sent.op == Op::read) {
        std::memcpy(of_memory, of_file, sent.length);
      } else {
        std::memcpy(of_file, of_memory, sent.length);
      }
      // Immediately, before the others are waited for.
      std::vector<std::byte> stored(sent.length);
      ASSERT_TRUE(under_test.pread({stored.data(), stored.size()}, offset));
      if (!result && sent.op == Op::write) std::ranges::copy(stored, of_file);  // any part of it
      if (!result && sent.op == Op::read) {
        // Earlier work on the stream may not have run yet, if nothing of the operation was sent.
        ASSERT_EQ(streams[device].synchronize(), 0);
        std::ranges::copy(memories[device].contents(at, sent.length), of_memory);
      } else if (result) {
        const std::vector<std::byte> held = memories[device].contents(at, sent.length);
        ASSERT_TRUE(std::equal(held.begin(), held.end(), of_memory)) << "round " << round;
      }
      ASSERT_TRUE(std::equal(stored.begin(), stored.end(), of_file)) << "round " << round;
    }
    for (const std::size_t device : {0, 1}) ASSERT_EQ(streams[device].synchronize(), 0);
    for (const std::size_t device : {0, 1}) ASSERT_EQ(memories[device].contents(), on_device[device]);
    ASSERT_EQ(contents(under_test), in_file);
  }
  EXPECT_EQ(fakeCudaPageableCopies(), 0U);
}

std::string model_name(const testing::TestParamInfo<GpuModelTest::ParamType>& info) {
  return std::string(to_string(std::get<0>(info.param))) + (std::get<1>(info.param) ? "Disturbed" : "") +
         (std::get<2>(info.param) == Direct::never ? "Buffered" : "") +
         (std::get<3>(info.param) ? "Gds" : "");
}

INSTANTIATE_TEST_SUITE_P(Backends, GpuModelTest,
                         testing::Combine(testing::ValuesIn(test::all_backends()), testing::Bool(),
                                          testing::Values(Direct::automatic, Direct::never),
                                          testing::Values(false)),
                         model_name);
INSTANTIATE_TEST_SUITE_P(Cufile, GpuModelTest,
                         testing::Combine(testing::Values(BackendKind::io_uring, BackendKind::threads),
                                          testing::Bool(), testing::Values(Direct::automatic),
                                          testing::Values(true)),
                         model_name);

}  // namespace
}  // namespace trunkline
