// Compares files and GPU memory with a simple model, vectors of bytes. On every backend, with and without
// disturbed completions.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "io/gpu/gpu_fixture.h"
#include "support/engines.h"
#include "support/sanitizers.h"

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
    auto made = Engine::create(test::small_engine(kind, disturbed, 8));
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
  for (int round = 0; round < test::scaled(120); ++round) {
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

constexpr std::size_t kRegions = 8;
constexpr std::size_t kRegion = 90'000;

// A file and the memory of two devices, with what they must contain. Each round gives every region of the
// file and of the memory to at most one operation, so that the model knows the outcome regardless of the
// order in which they run.
class ConcurrentModel {
 public:
  ConcurrentModel(File file, std::vector<std::byte> contents)
      : file_(std::move(file)), in_file_(std::move(contents)) {
    for (const std::size_t device : {0, 1}) memories_[device].set(on_device_[device]);
  }

  void run_round() {
    std::vector<Sent> all = send_all();
    for (Sent& sent : all) {
      if (sent.cancelled) sent.future.cancel();
    }
    for (Sent& sent : all) {
      ASSERT_NO_FATAL_FAILURE(check(sent));
    }
    for (const std::size_t device : {0, 1}) ASSERT_EQ(streams_[device].synchronize(), 0);
    for (const std::size_t device : {0, 1}) ASSERT_EQ(memories_[device].contents(), on_device_[device]);
  }

  const std::vector<std::byte>& in_file() const { return in_file_; }

 private:
  struct Sent {
    Future future;
    Op op;
    std::size_t file_region;
    std::size_t memory_region;
    std::size_t in_file;  // both within their region
    std::size_t in_memory;
    std::size_t length;
    bool cancelled;

    std::size_t device() const { return memory_region % 2; }
    std::size_t memory_offset() const { return memory_region * kRegion + in_memory; }
    std::size_t file_offset() const { return file_region * kRegion + in_file; }
  };

  std::vector<Sent> send_all() {
    std::array<std::size_t, kRegions> file_regions{};
    std::array<std::size_t, kRegions> memory_regions{};
    std::iota(file_regions.begin(), file_regions.end(), 0);
    std::iota(memory_regions.begin(), memory_regions.end(), 0);
    std::ranges::shuffle(file_regions, random_);
    std::ranges::shuffle(memory_regions, random_);
    std::vector<Sent> all;
    for (std::size_t index = 0; index < kRegions; ++index) {
      all.push_back({.future = {},
                     .op = random_() % 2 == 0 ? Op::read : Op::write,
                     .file_region = file_regions[index],
                     .memory_region = memory_regions[index],
                     .in_file = random_() % 3 == 0 ? 0 : random_() % (kRegion / 2),
                     .in_memory = random_() % 3 == 0 ? 0 : random_() % (kRegion / 2),
                     .length = 1 + random_() % (kRegion / 2),
                     .cancelled = random_() % 6 == 0});
      send(all.back());
    }
    return all;
  }

  void send(Sent& sent) {
    const std::size_t device = sent.device();
    const std::size_t at = sent.memory_offset();
    void* stream = nullptr;
    if (random_() % 2 == 0) {  // work that the operation must come after
      stream = streams_[device].handle();
      const auto value = static_cast<unsigned char>(random_());
      EXPECT_EQ(fakeCudaFill(memories_[device].address() + at, sent.length, value, stream), 0);
      std::fill_n(on_device_[device].begin() + static_cast<std::ptrdiff_t>(at), sent.length,
                  std::byte{value});
    }
    const MemoryView view = memories_[device].view(at, sent.length, stream);
    sent.future = sent.op == Op::read ? file_.async_pread(view, sent.file_offset())
                                      : file_.async_pwrite(view, sent.file_offset());
  }

  void check(Sent& sent) {
    const std::size_t device = sent.device();
    const std::size_t at = sent.memory_offset();
    std::byte* of_memory = on_device_[device].data() + at;
    std::byte* of_file = in_file_.data() + sent.file_offset();
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
    ASSERT_TRUE(file_.pread({stored.data(), stored.size()}, sent.file_offset()));
    if (!result && sent.op == Op::write) std::ranges::copy(stored, of_file);  // any part of it
    if (!result && sent.op == Op::read) {
      // Earlier work on the stream may not have run yet, if nothing of the operation was sent.
      ASSERT_EQ(streams_[device].synchronize(), 0);
      std::ranges::copy(memories_[device].contents(at, sent.length), of_memory);
    } else if (result) {
      const std::vector<std::byte> held = memories_[device].contents(at, sent.length);
      ASSERT_TRUE(std::equal(held.begin(), held.end(), of_memory));
    }
    ASSERT_TRUE(std::equal(stored.begin(), stored.end(), of_file));
  }

  File file_;
  std::vector<std::byte> in_file_;
  const GpuMemory memories_[2] = {GpuMemory(kRegions * kRegion, 0), GpuMemory(kRegions* kRegion, 1)};
  const GpuStream streams_[2] = {GpuStream(0), GpuStream(1)};
  std::vector<std::byte> on_device_[2] = {random_bytes(kRegions * kRegion, 3),
                                          random_bytes(kRegions* kRegion, 4)};
  std::mt19937_64 random_{31};
};

// Many concurrent operations, on two devices and behind two streams, some of them cancelled.
TEST_P(GpuModelTest, ConcurrentOperationsMatch) {
  const File under_test = file(engine_, random_bytes(kRegions * kRegion, 2), open_);
  ConcurrentModel model(under_test, contents(under_test));
  fakeCudaDelayUpTo(400);
  for (int round = 0; round < test::scaled(20); ++round) {
    SCOPED_TRACE(round);
    ASSERT_NO_FATAL_FAILURE(model.run_round());
    ASSERT_EQ(contents(under_test), model.in_file());
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
