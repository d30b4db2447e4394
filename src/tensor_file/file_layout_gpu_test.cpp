// Layouts whose extents are in GPU memory: the same files and the same contents, in the order of the caller's
// streams, whichever driver call fails.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <list>
#include <map>
#include <string>

#include "base/trace.h"
#include "support/gpu.h"
#include "tensor_file/file_layout_fixture.h"
#include "tensor_file/file_reader.h"
#include "tensor_file/file_set.h"

namespace trunkline::tensor_file {
namespace {

using namespace std::chrono_literals;
using test::random_sample;
using test::Sample;
using test::scaled;
using trunkline::test::expect_left;
using trunkline::test::gpu;
using trunkline::test::GpuMemory;
using trunkline::test::GpuStream;

constexpr int kOutOfMemory = 2;

// A sample with some of its extents in GPU memory.
struct GpuSample : Sample {
  std::list<GpuMemory> gpu_memory;

  GpuSample(Sample sample, std::mt19937_64& random, unsigned devices) : Sample(std::move(sample)) {
    for (Extent& extent : layout.extents) {
      if (random() % 4 == 0) continue;
      const auto ordinal = static_cast<unsigned>(random() % devices);
      const std::uint64_t misplaced = random() % 2 == 0 ? 0 : random() % 512;
      const std::uint64_t bytes = extent.memory.bytes;
      const GpuMemory& moved = gpu_memory.emplace_back(misplaced + bytes, ordinal);
      extent.memory = moved.view(misplaced, bytes);
      extent.after = *gpu(ordinal).fence(nullptr);
      const auto begin = file.begin() + static_cast<std::ptrdiff_t>(extent.offset);
      std::vector<std::byte> contents(misplaced);
      contents.insert(contents.end(), begin, begin + static_cast<std::ptrdiff_t>(bytes));
      moved.set(contents);
    }
  }

  // Erases the file's bytes from all extents.
  void clear() const {
    for (const Extent& extent : layout.extents) {
      if (is_host(extent.memory)) std::memset(extent.memory.data, 0x5A, extent.memory.bytes);
    }
    for (const GpuMemory& each : gpu_memory)
      each.set(std::vector<std::byte>(each.view().bytes, std::byte{0x5A}));
  }

  void expect_filled() const {
    for (const Extent& extent : layout.extents) {
      std::vector<std::byte> found(extent.memory.bytes);
      if (is_host(extent.memory)) {
        std::memcpy(found.data(), extent.memory.data, found.size());
      } else {
        fakeCudaPeek(found.data(), reinterpret_cast<std::uint64_t>(extent.memory.data), found.size());
      }
      ASSERT_EQ(std::memcmp(found.data(), file.data() + extent.offset, found.size()), 0) << extent.offset;
    }
  }

  // With the checksums that reading must find.
  FileLayout target() const {
    FileLayout wanted = layout;
    wanted.checksum_fields.clear();
    for (Checksum& checksum : wanted.checksums) checksum.expected = checksum_of(checksum);
    return wanted;
  }
};

class FileLayoutGpuTest : public test::FileLayoutTest {
 protected:
  GpuSample sample_of(std::uint64_t bytes, unsigned devices = 2) {
    return {random_sample(random_, bytes, root_.file("f")), random_, devices};
  }

  // A file of one extent, all of it in GPU memory.
  FileLayout layout_of(const GpuMemory& memory) const {
    FileLayout layout{.path = root_.file("f"), .bytes = memory.view().bytes};
    layout.extents.push_back({.offset = 0, .memory = memory.view()});
    layout.checksums.push_back({.begin = 0, .end = layout.bytes});
    return layout;
  }

  static Status save(const Engine& engine, const FileLayout& layout, const FileSetOptions& options) {
    auto set = FileSet::create(engine, {layout}, options);
    if (!set) return std::unexpected(set.error());
    if (auto staged = (*set)->stage(); !staged) return staged;
    return (*set)->finish();
  }

  static Status load(const Engine& engine, const FileLayout& layout, unsigned workers = 1) {
    auto file = File::open(engine, layout.path);
    if (!file) return std::unexpected(file.error());
    FileReader reader(engine, {{.file = *file, .layout = layout}}, {.workers = workers});
    return reader.read();
  }

  void store(const Sample& sample) const {
    std::ofstream(sample.layout.path, std::ios::binary)
        .write(reinterpret_cast<const char*>(sample.file.data()),
               static_cast<std::streamsize>(sample.file.size()));
  }

  trunkline::test::GpuWatch watch_;
  std::mt19937_64 random_{11};
};

TEST_F(FileLayoutGpuTest, FilesAreTheSameAsFromHostMemory) {
  const Engine engine = make_engine();
  fakeCudaDelayUpTo(300);
  for (int round = 0; round < scaled(24); ++round) {
    const GpuSample sample = sample_of(random_() % scaled(24 * kMiB));
    const Status saved = save(engine, sample.layout,
                              {.durable = false,
                               .write = {.stage_all = round % 2 == 0,
                                         .staging_bytes = (random_() % 5) * 4 * kMiB,
                                         .copiers = 1 + static_cast<unsigned>(round) % 3}});
    ASSERT_TRUE(saved) << saved.error().message;
    ASSERT_EQ(test::contents_of(sample.layout.path), sample.file) << round;
  }
  EXPECT_GT(fakeCudaCopies(), scaled(20U));
  EXPECT_EQ(fakeCudaPageableCopies(), 0U);
}

TEST_F(FileLayoutGpuTest, GpuMemoryIsFilled) {
  const Engine engine = make_engine();
  fakeCudaDelayUpTo(300);
  for (int round = 0; round < scaled(24); ++round) {
    const GpuSample sample = sample_of(random_() % scaled(24 * kMiB));
    store(sample);
    sample.clear();
    const Status loaded = load(engine, sample.target(), 1 + static_cast<unsigned>(round) % 3);
    ASSERT_TRUE(loaded) << loaded.error().message;
    sample.expect_filled();
  }
  EXPECT_GT(fakeCudaCopies(), scaled(20U));
  EXPECT_EQ(fakeCudaPageableCopies(), 0U);
}

// One slice for each block that has bytes on a device.
TEST_F(FileLayoutGpuTest, CopiesAreTraced) {
  const Engine engine = make_engine();
  const GpuMemory first(5 * kMiB);
  const GpuMemory second(kMiB, 1);
  FileLayout layout = layout_of(first);
  layout.extents.push_back({.offset = layout.bytes, .memory = second.view()});
  layout.bytes += kMiB;
  layout.checksums.front().end = layout.bytes;
  ASSERT_TRUE(trace::begin());
  const Status saved = save(engine, layout, {.durable = false});
  const Status loaded = load(engine, layout);
  const trace::Recording recording = trace::collect();
  ASSERT_TRUE(saved) << saved.error().message;
  ASSERT_TRUE(loaded) << loaded.error().message;
  std::map<std::string, std::uint64_t> bytes;  // by what was copied, and the device
  for (const trace::Event& event : recording.events) {
    if (event.device == trace::kNoText) continue;
    EXPECT_EQ(event.kind->category, trace::Category::copy);
    EXPECT_EQ(recording.texts[event.text], layout.path);
    EXPECT_GE(event.end_ns, event.start_ns);
    bytes[std::string(event.kind->name) + " " + recording.texts[event.device]] += event.bytes;
  }
  const std::map<std::string, std::uint64_t> expected = {{"copy from the GPU cuda:0", 5 * kMiB},
                                                         {"copy from the GPU cuda:1", kMiB},
                                                         {"copy to the GPU cuda:0", 5 * kMiB},
                                                         {"copy to the GPU cuda:1", kMiB}};
  EXPECT_EQ(bytes, expected);
}

TEST_F(FileLayoutGpuTest, AFlippedBitIsFound) {
  const Engine engine = make_engine();
  for (int round = 0; round < scaled(12); ++round) {
    GpuSample sample = sample_of(1 + random_() % (12 * kMiB));
    const FileLayout target = sample.target();
    const Checksum& hit = target.checksums[random_() % target.checksums.size()];
    sample.file[hit.begin + random_() % (hit.end - hit.begin)] ^= std::byte{1};
    store(sample);
    const Status loaded = load(engine, target);
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().kind, ErrorKind::corrupt);
  }
}

TEST_F(FileLayoutGpuTest, WorkOnTheCallersStreamComesFirst) {
  const Engine engine = make_engine();
  const GpuMemory memory(9 * kMiB);
  const GpuStream stream;
  for (const bool stage_all : {true, false}) {
    const unsigned char value = stage_all ? 3 : 4;
    fakeCudaHold(stream.handle());
    ASSERT_EQ(fakeCudaFill(memory.address(), 9 * kMiB, value, stream.handle()), 0);
    FileLayout layout = layout_of(memory);
    layout.extents[0].after = *gpu().fence(stream.handle());
    auto set = FileSet::create(engine, {layout}, {.durable = false, .write = {.stage_all = stage_all}});
    ASSERT_TRUE(set);
    auto staged = std::async(std::launch::async, [&] { return (*set)->stage(); });
    EXPECT_EQ(staged.wait_for(50ms), std::future_status::timeout);
    fakeCudaRelease();
    ASSERT_TRUE(staged.get());
    ASSERT_TRUE((*set)->finish());
    EXPECT_EQ(test::contents_of(layout.path), std::vector<std::byte>(9 * kMiB, std::byte{value}));
  }
  const std::vector<std::byte> stored(9 * kMiB, std::byte{5});
  {
    std::ofstream(root_.file("f"), std::ios::binary)
        .write(reinterpret_cast<const char*>(stored.data()), static_cast<std::streamsize>(stored.size()));
  }
  fakeCudaHold(stream.handle());
  ASSERT_EQ(fakeCudaFill(memory.address(), 9 * kMiB, 6, stream.handle()), 0);
  FileLayout layout = layout_of(memory);
  layout.extents[0].after = *gpu().fence(stream.handle());
  auto loaded = std::async(std::launch::async, [&] { return load(engine, layout); });
  EXPECT_EQ(loaded.wait_for(50ms), std::future_status::timeout);
  fakeCudaRelease();
  ASSERT_TRUE(loaded.get());
  EXPECT_EQ(memory.contents(), stored);  // and not what the stream wrote there
}

TEST_F(FileLayoutGpuTest, EveryFailureOfTheDriverIsReported) {
  const char* functions[] = {"cuCtxPushCurrent_v2",  "cuStreamCreate",    "cuEventCreate",
                             "cuEventRecord",        "cuStreamWaitEvent", "cuMemcpyHtoDAsync_v2",
                             "cuMemcpyDtoHAsync_v2", "cuEventSynchronize"};
  const GpuSample sample = sample_of(scaled(14 * kMiB));
  const FileLayout target = sample.target();
  const std::uint64_t streams = fakeCudaLive("streams");
  const std::uint64_t events = fakeCudaLive("events");
  const std::uint64_t registrations = fakeCudaLive("registrations");
  for (const char* function : functions) {
    unsigned failures = 0;
    for (unsigned after = 0;; after += trunkline::test::kPositionStep) {
      ASSERT_LT(after, 400U);
      SCOPED_TRACE(fmt::format("{} after {}", function, after));
      const Engine engine = make_engine();
      fakeCudaFail(function, kOutOfMemory, after, 1);
      const Status saved = save(engine, sample.layout, {.durable = false, .write = {.copiers = 2}});
      EXPECT_EQ(names(), saved ? std::vector<std::string>{"f"} : std::vector<std::string>{});
      if (saved) {
        ASSERT_EQ(test::contents_of(sample.layout.path), sample.file);
      }
      store(sample);
      sample.clear();
      const Status loaded = load(engine, target);
      if (loaded) sample.expect_filled();
      for (const Status& status : {saved, loaded}) {
        if (status) continue;
        ++failures;
        EXPECT_EQ(status.error().kind, ErrorKind::device) << status.error().message;
      }
      const bool none = fakeCudaPending(function);
      fakeCudaReset();
      ASSERT_TRUE(load(engine, target));
      sample.expect_filled();
      std::filesystem::remove(sample.layout.path);
      if (none) break;
      after += after / 4;  // later ones are like earlier ones
    }
    EXPECT_GE(failures, 1U) << function;
  }
  expect_left("streams", streams);
  expect_left("events", events);
  expect_left("registrations", registrations);
}

TEST_F(FileLayoutGpuTest, ADeviceThatBreaksFailsOperationsInFlight) {
  for (unsigned after = 0; after < 4; ++after) {
    SCOPED_TRACE(after);
    const GpuMemory memory(21 * kMiB);
    const Engine engine = make_engine();
    fakeCudaBreakDuringWork(after);
    const Status saved = save(engine, layout_of(memory), {.durable = false});
    ASSERT_FALSE(saved);
    EXPECT_EQ(saved.error().kind, ErrorKind::device);
    EXPECT_TRUE(names().empty());
    fakeCudaReset();
    ASSERT_TRUE(save(engine, layout_of(memory), {.durable = false}));
    fakeCudaBreakDuringWork(after);
    const Status loaded = load(engine, layout_of(memory));
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().kind, ErrorKind::device);
    fakeCudaReset();
    std::filesystem::remove(root_.file("f"));
  }
}

TEST_F(FileLayoutGpuTest, CancelEndsWaitingForAStream) {
  const Engine engine = make_engine();
  const GpuMemory memory(30 * kMiB);
  auto set = FileSet::create(engine, {layout_of(memory)}, {.write = {.stage_all = true}});
  ASSERT_TRUE(set);
  fakeCudaHoldCopies();
  auto staged = std::async(std::launch::async, [&] { return (*set)->stage(); });
  EXPECT_EQ(staged.wait_for(50ms), std::future_status::timeout);
  (*set)->cancel();
  // Copies that have started cannot be cancelled; nothing is released before they end.
  EXPECT_EQ(staged.wait_for(50ms), std::future_status::timeout);
  fakeCudaRelease();
  const Status status = staged.get();
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().kind, ErrorKind::cancelled);
  EXPECT_TRUE(names().empty());
}

TEST_F(FileLayoutGpuTest, MemoryThatCannotBePinnedIsOnlySlower) {
  const Engine engine = make_engine();
  const GpuSample sample = sample_of(9 * kMiB);
  fakeCudaFail("cuMemHostRegister_v2", kOutOfMemory, 0, 1000);
  ASSERT_TRUE(save(engine, sample.layout, {.durable = false}));
  EXPECT_EQ(test::contents_of(sample.layout.path), sample.file);
  sample.clear();
  ASSERT_TRUE(load(engine, sample.target()));
  sample.expect_filled();
  EXPECT_GT(fakeCudaPageableCopies(), 0U);
}

TEST_F(FileLayoutGpuTest, PinsAreKeptForReuseAndReleasedWithTheirMemory) {
  const std::uint64_t before = fakeCudaLive("registrations");
  {
    const Engine engine = make_engine();
    const GpuSample sample = sample_of(20 * kMiB);
    ASSERT_TRUE(save(engine, sample.layout, {.durable = false}));
    const std::uint64_t kept = fakeCudaLive("registrations");
    EXPECT_GT(kept, before);
    ASSERT_TRUE(save(engine, sample.layout, {.durable = false}));
    EXPECT_LE(fakeCudaLive("registrations"),
              kept + 1);  // the number of blocks in use at a time varies by one
  }
  expect_left("registrations", before);
}

TEST_F(FileLayoutGpuTest, CapturesAreNotInvalidated) {
  const Engine engine = make_engine();
  const GpuSample sample = sample_of(9 * kMiB);
  const GpuStream stream;
  fakeCudaCapture(stream.handle());
  ASSERT_TRUE(save(engine, sample.layout, {.durable = false}));
  sample.clear();
  ASSERT_TRUE(load(engine, sample.target()));
  sample.expect_filled();
}

}  // namespace
}  // namespace trunkline::tensor_file
