// GPUDirect Storage transfers between files and GPU memory: when they are chosen, which bytes use which I/O
// path, with every call of the library failing and every kind of result.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "device/cuda/process.h"
#include "device/device.h"
#include "io/gpu/gpu_fixture.h"
#include "support/sanitizers.h"

namespace trunkline {
namespace {

using namespace std::chrono_literals;
using test::expect_left;
using test::GpuMemory;
using test::GpuStream;
using test::GpuTest;
using test::random_bytes;

constexpr int kInternalError = 5030;
enum CufileMode : int { direct, compatible, pretending, wrong, nothing, by_io_uring, by_aio };

// The next file is probed anew.
void forget_gds_probes() {
  const auto process = cuda::CudaProcess::current();
  ASSERT_TRUE(process) << process.error().message;
  (*process)->gds().probes().forget();
}

class GdsTest : public GpuTest {
 protected:
  void SetUp() override {
    ::setenv("TRUNKLINE_CUFILE", FAKE_CUDA_LIBRARY, 1);  // NOLINT(concurrency-mt-unsafe)
    forget_gds_probes();
    const auto explanation = engine({.lanes = 1, .gpu = GpuPath::bounce}).explain(directory_.path());
    if (!explanation || !explanation->direct) GTEST_SKIP() << "no direct I/O here";
  }
  void TearDown() override {
    ::unsetenv("TRUNKLINE_CUFILE");  // NOLINT(concurrency-mt-unsafe)
  }

  // Payload bytes by I/O path since the last call.
  struct Moved {
    std::uint64_t gds = 0;
    std::uint64_t bounced = 0;
  };
  Moved moved(const Engine& engine) {
    const EngineStats stats = engine.stats();
    const Moved since{stats.bytes_gds - before_.gds, stats.bytes_bounced - before_.bounced};
    before_ = {stats.bytes_gds, stats.bytes_bounced};
    return since;
  }
  void begin_with(const Engine& engine) {
    before_ = {engine.stats().bytes_gds, engine.stats().bytes_bounced};
  }

  static Engine gds_engine(GpuPath path = GpuPath::gds) { return engine({.lanes = 1, .gpu = path}); }

 private:
  Moved before_;
};

TEST_F(GdsTest, TheDeviceMovesAlignedBytes) {
  const Engine made = gds_engine();
  const auto bytes = random_bytes(5 * kMiB + 4096, 1);
  const File target = file(made, bytes);
  const GpuMemory memory(bytes.size());
  begin_with(made);
  ASSERT_TRUE(target.pread(memory.view(), 0));
  EXPECT_EQ(memory.contents(), bytes);
  const Moved read = moved(made);
  EXPECT_EQ(read.gds, bytes.size());
  EXPECT_EQ(read.bounced, 0U);
  EXPECT_EQ(fakeCudaCopies(), 2U);  // the probe's
  const auto changed = random_bytes(bytes.size(), 2);
  memory.set(changed);
  ASSERT_TRUE(target.pwrite(memory.view(), 0));
  EXPECT_EQ(moved(made).gds, bytes.size());
  EXPECT_EQ(contents(target), changed);
  ASSERT_TRUE(target.close());
  expect_left("files", 0);
}

TEST_F(GdsTest, EdgesGoThroughPinnedMemory) {
  const Engine made = gds_engine();
  const auto bytes = random_bytes(3 * kMiB + 77, 3);
  const File target = file(made, bytes);
  const GpuMemory memory(bytes.size() + 8192);
  // The memory is aligned like the file: the middle is direct.
  ASSERT_TRUE(target.pread(memory.view(100, 3 * kMiB - 100), 100));
  EXPECT_EQ(memory.contents(100, 3 * kMiB - 100),
            std::vector<std::byte>(bytes.begin() + 100, bytes.begin() + 3 * kMiB));
  const std::uint64_t moved = made.stats().bytes_gds;
  EXPECT_EQ(moved, 3 * kMiB - 4096);
  // Where it is not, nothing is direct.
  ASSERT_TRUE(target.pread(memory.view(512, bytes.size()), 0));
  EXPECT_EQ(memory.contents(512, bytes.size()), bytes);
  EXPECT_EQ(made.stats().bytes_gds, moved);
  ASSERT_TRUE(target.pwrite(memory.view(612, bytes.size() - 100), 100));
  EXPECT_EQ(contents(target), bytes);
}

// Reads in cuFile's compatibility mode that read(2) does not count.
TEST_F(GdsTest, ReadsByOtherQueuesAreDetected) {
  for (const auto& [mode, backend] :
       {std::pair(by_io_uring, BackendKind::io_uring), std::pair(by_aio, BackendKind::libaio)}) {
    const auto host = Engine::create({.backend = backend, .lanes = 1});
    if (!host) continue;  // then cuFile does not have such a queue here either
    SCOPED_TRACE(to_string(backend));
    const Engine made = gds_engine(GpuPath::automatic);
    const auto bytes = random_bytes(2 * kMiB, 5);
    const File target = file(made, bytes);
    // Our own queues, which are always busy, are not mistaken for cuFile's.
    const auto own = File::open(*host, target.path(), {.mode = Mode::read});
    ASSERT_TRUE(own) << own.error().message;
    std::atomic<bool> over{false};
    std::thread reader([&] {
      std::vector<std::byte> memory(bytes.size());
      while (!over) EXPECT_TRUE(own->async_pread(std::span(memory), 0).result());
    });
    for (const int each : {static_cast<int>(direct), static_cast<int>(mode)}) {
      fakeCufileMode(each);
      forget_gds_probes();
      const auto explanation = made.explain(directory_.path());
      ASSERT_TRUE(explanation);
      EXPECT_EQ(explanation->gpu, each == direct ? "gds" : "bounce") << explanation->gpu_why;
      if (each != direct) {
        EXPECT_NE(explanation->gpu_why.find("by io_uring or AIO in this process"), std::string::npos)
            << explanation->gpu_why;
      }
    }
    over = true;
    reader.join();
    fakeCufileMode(direct);
  }
}

TEST_F(GdsTest, ChosenWhereItIsDirect) {
  struct Case {
    int mode;
    GpuPath path_option;
    std::string path;
    const char* why;
  };
  for (const Case& each : {
           Case{compatible, GpuPath::automatic, "bounce", "compatibility mode"},
           Case{pretending, GpuPath::automatic, "bounce", "read() in this process"},
           Case{wrong, GpuPath::automatic, "bounce", "other bytes than the file holds"},
           Case{direct, GpuPath::bounce, "bounce", "was requested"},
           Case{compatible, GpuPath::gds, "gds", "read the right bytes"},
           Case{direct, GpuPath::automatic, "gds", "without read(), io_uring or AIO in this process"},
       }) {
    SCOPED_TRACE(each.why);
    fakeCufileMode(each.mode);
    forget_gds_probes();
    const Engine made = gds_engine(each.path_option);
    const auto bytes = random_bytes(2 * kMiB, 4);
    const File target = file(made, bytes);
    const auto explanation = made.explain(target.path());
    ASSERT_TRUE(explanation);
    EXPECT_EQ(explanation->gpu, each.path);
    const auto of_directory = made.explain(directory_.path());
    ASSERT_TRUE(of_directory);
    EXPECT_EQ(of_directory->gpu, each.path);
    EXPECT_NE(of_directory->gpu_why.find(each.why), std::string::npos) << of_directory->gpu_why;
    EXPECT_NE(explanation->gpu_why.find(each.why), std::string::npos) << explanation->gpu_why;
    const GpuMemory memory(bytes.size());
    begin_with(made);
    ASSERT_TRUE(target.pread(memory.view(), 0));
    EXPECT_EQ(memory.contents(), bytes);
    const Moved read = moved(made);
    EXPECT_EQ(read.gds, each.path == "gds" ? bytes.size() : 0);
    EXPECT_EQ(read.bounced, each.path == "gds" ? 0 : bytes.size());
  }
}

TEST_F(GdsTest, RequiredWhereItDoesNotWork) {
  fakeCufileMode(wrong);
  const Engine made = engine({.lanes = 1, .gpu = GpuPath::gds});
  const auto explanation = made.explain(directory_.path());
  ASSERT_TRUE(explanation);
  const GpuMemory memory(kMiB, 1);  // no file was opened for this device before
  const File target = file(made, random_bytes(kMiB, 5));
  const auto read = target.pread(memory.view(), 0);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().kind, ErrorKind::unsupported);
  EXPECT_NE(read.error().message.find("other bytes"), std::string::npos) << read.error().message;
  EXPECT_EQ(target.pending(), 0U);
  ::setenv("TRUNKLINE_CUFILE", "/nowhere/libcufile.so", 1);  // NOLINT(concurrency-mt-unsafe)
  const auto without = engine({.lanes = 1}).explain(directory_.path());
  ASSERT_TRUE(without);
  EXPECT_EQ(without->gpu, "bounce");
  EXPECT_NE(without->gpu_why.find("/nowhere/libcufile.so"), std::string::npos) << without->gpu_why;
}

TEST_F(GdsTest, OnlyWhereDirectIoIsUsed) {
  const auto bytes = random_bytes(kMiB, 6);
  const GpuMemory memory(bytes.size());
  const Engine automatic = gds_engine(GpuPath::automatic);
  const File buffered = file(automatic, bytes, {.direct = Direct::never});
  ASSERT_TRUE(buffered.pread(memory.view(), 0));
  EXPECT_EQ(memory.contents(), bytes);
  EXPECT_EQ(automatic.stats().bytes_gds, 0U);
  const File required = file(gds_engine(), bytes, {.direct = Direct::never});
  const auto read = required.pread(memory.view(), 0);
  ASSERT_FALSE(read);
  EXPECT_NE(read.error().message.find("direct I/O is not used"), std::string::npos) << read.error().message;
}

TEST_F(GdsTest, RunsAfterTheCallersStream) {
  const Engine made = gds_engine();
  const auto bytes = random_bytes(3 * kMiB, 7);
  const File target = file(made, bytes);
  const GpuMemory memory(bytes.size());
  const GpuStream stream;
  ASSERT_TRUE(target.pread(memory.view(), 0));
  fakeCudaHold(stream.handle());
  ASSERT_EQ(fakeCudaFill(memory.address(), bytes.size(), 9, stream.handle()), 0);
  Future written = target.async_pwrite(memory.view(stream.handle()), 0);
  EXPECT_FALSE(written.wait(50ms));
  fakeCudaRelease();
  ASSERT_TRUE(written.result());
  EXPECT_EQ(contents(target), std::vector<std::byte>(bytes.size(), std::byte{9}));
}

TEST_F(GdsTest, PinnedMemoryIsRegisteredOnce) {
  const auto bytes = random_bytes(4 * kMiB, 8);
  const Engine made = gds_engine();
  const File target = file(made, bytes);
  const GpuMemory memory(bytes.size());
  {
    Device& device = test::gpu();
    auto pinned = device.register_for_gds({memory.view().data, bytes.size()});
    ASSERT_TRUE(pinned) << pinned.error().message;
    ASSERT_NE(*pinned, nullptr);
    auto again = device.register_for_gds({memory.view().data + 4096, kMiB});  // lies within
    ASSERT_TRUE(again);
    expect_left("direct memory", 1);
    ASSERT_TRUE(target.pread(memory.view(0, 4096), 0));  // the probe has its own memory
    const std::uint64_t before = fakeCufileUnregistered();
    Future read = target.async_pread(memory.view(kMiB, 2 * kMiB), kMiB);
    pinned->reset();
    ASSERT_TRUE(read.result());
    EXPECT_EQ(fakeCufileUnregistered(), before);
    again->reset();
    expect_left("direct memory", 0);
    ASSERT_TRUE(target.pread(memory.view(), 0));
    EXPECT_GT(fakeCufileUnregistered(), before);
  }
  EXPECT_EQ(memory.contents(), bytes);
}

// torch's memory begins at any address, and readers do not know what was pinned.
TEST_F(GdsTest, PinnedMemoryAtAnyAddress) {
  const auto bytes = random_bytes(4 * kMiB, 19);
  const Engine made = gds_engine();
  const File target = file(made, bytes);
  const GpuMemory memory(bytes.size());
  Device& device = test::gpu();
  const auto pin = [&](std::size_t begin, std::size_t size) {
    auto pinned = device.register_for_gds({memory.view().data + begin, size});
    EXPECT_TRUE(pinned);
    return *pinned;
  };
  for (const auto& [begin, size] : {std::pair<std::size_t, std::size_t>{512, 3 * kMiB},
                                    {kMiB + 512, 10'000},
                                    {4096, kMiB},
                                    {100, 4000}}) {
    SCOPED_TRACE(begin);
    const auto pinned = pin(begin, size);
    const auto wider = pin(0, bytes.size());
    EXPECT_EQ(pinned != nullptr, size > 4096);
    memory.set(random_bytes(bytes.size(), 20));
    ASSERT_TRUE(target.pread(memory.view(), 0));
    EXPECT_EQ(memory.contents(), bytes);
    ASSERT_TRUE(target.pread(memory.view(8192, kMiB), 8192));
    EXPECT_EQ(memory.contents(), bytes);
    ASSERT_TRUE(target.pwrite(memory.view(), 0));
    EXPECT_EQ(contents(target), bytes);
  }
  expect_left("direct memory", 0);
  // Memory that cannot be registered is used unregistered.
  fakeCudaFail("cuFileBufRegister", kInternalError, 0, 1);
  EXPECT_EQ(pin(0, bytes.size()), nullptr);
  ASSERT_TRUE(target.pread(memory.view(), 0));
}

TEST_F(GdsTest, EnginesThatShareAFileDecideForThemselves) {
  fakeCufileMode(compatible);
  const auto bytes = random_bytes(2 * kMiB, 21);
  const Engine required = gds_engine();
  const Engine automatic = gds_engine(GpuPath::automatic);
  const File target = file(required, bytes);
  const GpuMemory memory(bytes.size());
  const Request request{.op = Op::read, .file = &target, .memory = memory.view(), .offset = 0};
  ASSERT_TRUE(automatic.submit({&request, 1}).front().result());
  EXPECT_EQ(automatic.stats().bytes_gds, 0U);
  ASSERT_TRUE(required.submit({&request, 1}).front().result());
  EXPECT_EQ(required.stats().bytes_gds, bytes.size());
  ASSERT_TRUE(automatic.submit({&request, 1}).front().result());
  EXPECT_EQ(automatic.stats().bytes_gds, 0U);
}

TEST_F(GdsTest, AShortTransferContinuesThroughPinnedMemory) {
  const auto bytes = random_bytes(3 * kMiB, 9);
  const GpuMemory memory(bytes.size());
  for (const long result : {0L, 100L, 4096L, 500'000L}) {
    SCOPED_TRACE(result);
    const Engine made = gds_engine();
    const File target = file(made, bytes);
    memory.set(random_bytes(bytes.size(), 10));
    ASSERT_TRUE(target.pread(memory.view(0, 4096), 0));
    begin_with(made);
    fakeCufileResult(result, 1, 1);
    ASSERT_TRUE(target.pread(memory.view(), 0));
    EXPECT_EQ(memory.contents(), bytes);
    const Moved read = moved(made);
    EXPECT_EQ(read.bounced, kMiB - static_cast<std::uint64_t>(result) / 4096 * 4096);
    EXPECT_EQ(read.gds, bytes.size() - read.bounced);
    const auto changed = random_bytes(bytes.size(), 11);
    memory.set(changed);
    fakeCufileResult(result, 0, 2);
    ASSERT_TRUE(target.pwrite(memory.view(), 0));
    const Moved written = moved(made);
    EXPECT_EQ(written.gds + written.bounced, bytes.size());
    EXPECT_GT(written.bounced, 0U);
    EXPECT_EQ(contents(target), changed);
  }
}

TEST_F(GdsTest, PastTheEndIsAnError) {
  const Engine made = gds_engine();
  const File target = file(made, random_bytes(kMiB + 100, 12));
  const GpuMemory memory(2 * kMiB);
  const auto read = target.pread(memory.view(), 0);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().kind, ErrorKind::end_of_file);
}

TEST_F(GdsTest, AFailedTransferIsCopiedInstead) {
  const auto bytes = random_bytes(3 * kMiB, 13);
  const GpuMemory memory(bytes.size());
  for (const long result : {-1L, -5L, -static_cast<long>(kInternalError)}) {
    SCOPED_TRACE(result);
    const Engine made = gds_engine(GpuPath::automatic);
    const File target = file(made, bytes);
    ASSERT_TRUE(target.pread(memory.view(0, 4096), 0));
    const std::uint64_t before = made.stats().bytes_gds;
    memory.set(random_bytes(bytes.size(), 14));
    fakeCufileResult(result, 0, 100);
    ASSERT_TRUE(target.pread(memory.view(), 0));
    EXPECT_EQ(memory.contents(), bytes);
    EXPECT_EQ(made.stats().bytes_gds, before);
    const auto changed = random_bytes(bytes.size(), 22);
    memory.set(changed);
    ASSERT_TRUE(target.pwrite(memory.view(), 0));
    EXPECT_EQ(contents(target), changed);
    EXPECT_EQ(made.stats().bytes_gds, before);
    fakeCufileResult(0, 0, 0);
    memory.set(bytes);
    ASSERT_TRUE(target.pwrite(memory.view(), 0));
    EXPECT_EQ(contents(target), bytes);
    // A failure with a kernel error may be temporary; after others, it is not tried again.
    const bool named = result == -5L;
    EXPECT_EQ(made.stats().bytes_gds > before, named);
    const auto explanation = made.explain(target.path());
    ASSERT_TRUE(explanation);
    EXPECT_NE(named, std::ranges::any_of(explanation->refused, [](const Refusal& refusal) {
                return refusal.what == "GPUDirect Storage";
              }));
  }
  const Engine required = gds_engine();
  const File target = file(required, bytes);
  ASSERT_TRUE(target.pread(memory.view(0, 4096), 0));
  fakeCufileResult(-kInternalError, 0, 1);
  const auto read = target.pread(memory.view(), 0);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().kind, ErrorKind::device);
  EXPECT_NE(read.error().message.find("an internal error (5030)"), std::string::npos) << read.error().message;
  fakeCufileResult(-ENOSPC, 0, 1);
  const auto written = target.pwrite(memory.view(), 0);
  ASSERT_FALSE(written);
  EXPECT_EQ(written.error().code, ENOSPC) << written.error().message;
  fakeCufileResult(0, 0, 0);
}

// Each of these calls fails once, at every position: the bytes arrive or the operation reports what failed.
TEST_F(GdsTest, EveryCallFailing) {
  const auto bytes = random_bytes(2 * kMiB, 15);
  const GpuMemory memory(bytes.size());
  {
    const Engine made = gds_engine();  // the library is open, and the filesystem known
    const File target = file(made, bytes);
    ASSERT_TRUE(target.pread(memory.view(), 0));
  }
  for (const char* function : {"cuFileDriverGetProperties", "cuFileHandleRegister", "cuFileStreamRegister",
                               "cuFileReadAsync", "cuFileWriteAsync", "cuStreamCreate", "cuEventCreate",
                               "cuStreamWaitEvent", "cuEventRecord", "cuEventSynchronize"}) {
    for (unsigned position = 0; position < 12; position += test::kPositionStep) {
      SCOPED_TRACE(std::string(function) + " " + std::to_string(position));
      const Engine made = gds_engine(GpuPath::automatic);
      const File target = file(made, bytes);
      const std::vector<std::byte> before = random_bytes(bytes.size(), 16);
      memory.set(before);
      fakeCudaFail(function, std::string_view(function).starts_with("cuFile") ? kInternalError : 2, position,
                   1);
      const auto read = target.pread(memory.view(), 0);
      const bool pending = fakeCudaPending(function);
      if (read) {
        EXPECT_EQ(memory.contents(), bytes);
      } else {
        EXPECT_EQ(read.error().kind, ErrorKind::device) << read.error().message;
      }
      const auto written = target.pwrite(memory.view(), 0);
      if (read && written) {
        EXPECT_EQ(contents(target), bytes);
      } else if (!written) {
        EXPECT_EQ(written.error().kind, ErrorKind::device) << written.error().message;
      }
      EXPECT_EQ(target.pending(), 0U);
      if (pending) {
        fakeCudaFail(function, 0, 0, 0);
        break;
      }
    }
  }
}

TEST_F(GdsTest, ADeviceThatBreaksIsAnError) {
  const Engine made = gds_engine(GpuPath::automatic);
  const File target = file(made, random_bytes(4 * kMiB, 17));
  const GpuMemory memory(4 * kMiB);
  ASSERT_TRUE(target.pread(memory.view(0, 4096), 0));
  fakeCudaBreakDuringWork(2);
  const auto read = target.pread(memory.view(), 0);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().kind, ErrorKind::device);
  fakeCudaReset();
  ASSERT_TRUE(target.pread(memory.view(), 0));
}

TEST_F(GdsTest, TwoDevicesShareAFile) {
  const Engine made = engine({.lanes = 2, .gpu = GpuPath::gds});
  const auto bytes = random_bytes(2 * kMiB, 18);
  const File target = file(made, bytes);
  const GpuMemory first(bytes.size(), 0);
  const GpuMemory second(bytes.size(), 1);
  Future read = target.async_pread(first.view(), 0);
  ASSERT_TRUE(target.pread(second.view(), 0));
  ASSERT_TRUE(read.result());
  EXPECT_EQ(first.contents(), bytes);
  EXPECT_EQ(second.contents(), bytes);
  EXPECT_EQ(made.stats().bytes_gds, 2 * bytes.size());
}

TEST_F(GdsTest, ALinkFromAnotherFilesystemIsHarmless) {
  if (::access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "no writable tmpfs at /dev/shm";
  const auto bytes = random_bytes(2 * kMiB, 30);
  const Engine made = gds_engine(GpuPath::automatic);
  const File target = file(made, bytes);
  const std::string link = "/dev/shm/trunkline-link-" + std::to_string(::getpid());
  ASSERT_EQ(::symlink(target.path().c_str(), link.c_str()), 0);
  const auto linked = File::open(made, link);
  ::unlink(link.c_str());
  ASSERT_TRUE(linked);
  const GpuMemory memory(bytes.size());
  ASSERT_TRUE(linked->pread(memory.view(), 0));
  EXPECT_EQ(memory.contents(), bytes);
  const auto explanation = made.explain(target.path());
  ASSERT_TRUE(explanation);
  EXPECT_EQ(explanation->gpu, "gds") << explanation->gpu_why;
  ASSERT_TRUE(target.pread(memory.view(), 0));
  EXPECT_EQ(made.stats().bytes_gds, 2 * bytes.size());
}

TEST_F(GdsTest, LeftoversOfOneProbeDoNotPassTheNext) {
  const auto bytes = random_bytes(2 * kMiB, 31);
  const Engine made = gds_engine(GpuPath::automatic);
  const File before = file(made, bytes);
  const GpuMemory memory(bytes.size());
  ASSERT_TRUE(before.pread(memory.view(), 0));
  EXPECT_EQ(made.stats().bytes_gds, bytes.size());
  fakeCufileMode(nothing);  // reads nothing, but reports success
  forget_gds_probes();
  const auto after = File::open(made, before.path());
  ASSERT_TRUE(after);
  memory.set(random_bytes(bytes.size(), 32));
  ASSERT_TRUE(after->pread(memory.view(), 0));
  EXPECT_EQ(memory.contents(), bytes);
  EXPECT_EQ(made.stats().bytes_gds, bytes.size());
}

TEST_F(GdsTest, RequiringGdsIsNotOverriddenByOthersFallback) {
  const auto bytes = random_bytes(2 * kMiB, 33);
  const GpuMemory memory(bytes.size());
  const Engine required = gds_engine();
  const Engine automatic = gds_engine(GpuPath::automatic);
  const File target = file(required, bytes);
  const Request request{.op = Op::read, .file = &target, .memory = memory.view(), .offset = 0};
  fakeCufileResult(-kInternalError, 0, 1);
  ASSERT_TRUE(automatic.submit({&request, 1}).front().result());
  const auto bounced = automatic.stats().bytes_gds;
  EXPECT_LT(bounced, bytes.size());
  ASSERT_TRUE(automatic.submit({&request, 1}).front().result());
  EXPECT_EQ(automatic.stats().bytes_gds, bounced);
  ASSERT_TRUE(required.submit({&request, 1}).front().result());
  EXPECT_EQ(required.stats().bytes_gds, bytes.size());
}

TEST_F(GdsTest, ATemporaryFailureIsNotRemembered) {
  const auto bytes = random_bytes(2 * kMiB, 35);
  const GpuMemory memory(bytes.size());
  const Engine made = gds_engine(GpuPath::automatic);
  const File target = file(made, bytes);
  ASSERT_TRUE(target.pread(memory.view(), 0));
  fakeCudaFail("cuStreamWaitEvent", 2, 0, 1);
  ASSERT_TRUE(target.pread(memory.view(), 0));
  const auto before = made.stats().bytes_gds;
  EXPECT_LT(before, 2 * bytes.size());
  ASSERT_TRUE(target.pread(memory.view(), 0));
  EXPECT_EQ(made.stats().bytes_gds - before, bytes.size());
}

}  // namespace
}  // namespace trunkline
