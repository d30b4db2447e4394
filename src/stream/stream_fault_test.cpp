#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <future>
#include <thread>

#include "stream/stream_fixture.h"

namespace trunkline {
namespace {

using namespace std::chrono_literals;
using test::StoredUnits;

class StreamFaultTest : public test::StreamTest {
 protected:
  void SetUp() override { stored_ = store_plain(make_engine(), std::vector<std::uint64_t>(5, 300'000)); }

  Engine faulty_engine() {
    faults_ = Faults::create();
    return make_engine({.lanes = 1, .queue_depth = 8, .block_bytes = 64 * kKiB, .faults = faults_});
  }

  WeightStream open_stream(const Engine& engine, StreamVerify verify = StreamVerify::once,
                           std::uint64_t memory_bytes = 2 * 303'104) {
    auto stream = open(engine, stored_, {.memory_bytes = memory_bytes, .verify = verify});
    EXPECT_TRUE(stream) << stream.error().message;
    return std::move(*stream);
  }

  // Returns the errors of one cycle; checks that bytes that are handed out are right.
  std::vector<Error> cycle(WeightStream& stream) {
    std::vector<Error> errors;
    for (std::size_t unit = 0; unit < stored_.units.size(); ++unit) {
      const auto memory = stream.acquire(unit);
      if (!memory) {
        errors.push_back(memory.error());
        continue;
      }
      EXPECT_TRUE(holds(stored_, unit, *memory)) << unit;
      EXPECT_TRUE(stream.release(unit));
    }
    return errors;
  }

  // Flips bits of one byte of a unit in its file; with `mask` 0 it restores the byte.
  void flip(std::size_t unit, std::size_t at, unsigned char mask = 1) {
    std::fstream file(stored_.paths[0], std::ios::binary | std::ios::in | std::ios::out);
    const auto place = static_cast<std::streamoff>(stored_.units[unit].parts[0].offset + at);
    file.seekp(place);
    file.put(static_cast<char>(stored_.contents[unit][at] ^ std::byte{mask}));
  }

  StoredUnits stored_;
  std::shared_ptr<Faults> faults_;
};

TEST_F(StreamFaultTest, EveryFailedReadIsReportedOnceAndReadAgain) {
  for (const std::uint64_t memory : {2U * 303'104U, 4U * 303'104U}) {
    for (std::uint64_t at = 0;; ++at) {
      const Engine engine = faulty_engine();
      faults_->fail(Op::read, at, EIO);
      WeightStream stream = open_stream(engine, StreamVerify::once, memory);
      const std::vector<Error> errors = cycle(stream);
      if (faults_->injected() == 0) {
        EXPECT_GE(at, 25U);
        break;
      }
      // A unit of the next cycle that was read ahead may be the one that failed.
      ASSERT_LE(errors.size(), 1U);
      if (!errors.empty()) {
        EXPECT_EQ(errors[0].code, EIO);
        EXPECT_EQ(errors[0].path, stored_.paths[0]);
      }
      ASSERT_LE(errors.size() + cycle(stream).size(), 1U);
      EXPECT_EQ(stream.stats().failed, 1U);
      EXPECT_TRUE(cycle(stream).empty());
    }
  }
}

TEST_F(StreamFaultTest, DisturbedCompletionsChangeNothing) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const Engine engine = faulty_engine();
    faults_->disturb(seed, 0.2, 0.2);
    WeightStream stream = open_stream(engine, StreamVerify::always);
    for (int round = 0; round < 3; ++round) ASSERT_TRUE(cycle(stream).empty());
  }
}

TEST_F(StreamFaultTest, OneUnitIsNotDelayedByAnother) {
  const Engine engine = faulty_engine();
  faults_->hold(Op::read, 5, 5);  // all of the second unit
  WeightStream stream = open_stream(engine);
  ASSERT_TRUE(stream.acquire(0));
  const auto late = stream.acquire(1, 20ms);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().kind, ErrorKind::timed_out);
  EXPECT_GE(stream.stats().wait_ns, 15'000'000U);
  faults_->release();
  const auto memory = stream.acquire(1);
  ASSERT_TRUE(memory);
  EXPECT_TRUE(holds(stored_, 1, *memory));
  EXPECT_EQ(stream.stats().failed, 0U);
}

TEST_F(StreamFaultTest, AnAbandonedLateReadIsHarmless) {
  for (const std::uint64_t held : {1U, 3U, 5U}) {
    const Engine engine = faulty_engine();
    faults_->hold(Op::read, 5, held);
    WeightStream stream = open_stream(engine);
    ASSERT_TRUE(stream.acquire(0));
    ASSERT_TRUE(stream.release(0));
    // Another unit now: the slot of the second unit is free only once its read has ended.
    auto other = std::async(std::launch::async, [&] { return stream.acquire(3); });
    std::this_thread::sleep_for(10ms);
    faults_->release();
    const auto memory = other.get();
    ASSERT_TRUE(memory) << memory.error().message;
    EXPECT_TRUE(holds(stored_, 3, *memory));
    ASSERT_TRUE(stream.release(3));
    for (int round = 0; round < 2; ++round) EXPECT_TRUE(cycle(stream).empty());
  }
}

TEST_F(StreamFaultTest, DestructionWaitsForReadsInFlight) {
  for (const std::uint64_t first : {0U, 3U, 7U}) {
    const Engine engine = faulty_engine();
    faults_->hold(Op::read, first, 3);
    auto stream = std::make_unique<WeightStream>(open_stream(engine));
    while (faults_->commands(Op::read) < first + 1) std::this_thread::sleep_for(1ms);
    auto ended = std::async(std::launch::async, [&] { stream.reset(); });
    EXPECT_EQ(ended.wait_for(30ms), std::future_status::timeout);
    faults_->release();
    ended.get();
  }
}

TEST_F(StreamFaultTest, UnitsReadAheadOfAnErrorAreReadAgain) {
  for (const std::uint64_t memory : {2U * 303'104U, 5U * 303'104U}) {
    const Engine engine = make_engine();
    for (const std::size_t unit : {0U, 1U}) flip(unit, 1000, 1);
    WeightStream stream = open_stream(engine, StreamVerify::once, memory);
    while (stream.stats().units_read < memory / 303'104U) std::this_thread::sleep_for(1ms);
    const auto damaged = stream.acquire(0);
    ASSERT_FALSE(damaged);
    EXPECT_EQ(damaged.error().kind, ErrorKind::corrupt);
    for (const std::size_t unit : {0U, 1U}) flip(unit, 1000, 0);  // repaired
    EXPECT_TRUE(cycle(stream).empty());
  }
}

TEST_F(StreamFaultTest, TheTimeSpentReadingIsCounted) {
  const Engine engine = faulty_engine();
  faults_->hold(Op::read, 5, 5);  // all of the second unit
  WeightStream stream = open_stream(engine);
  std::this_thread::sleep_for(50ms);
  EXPECT_GE(stream.stats().read_ns, 50'000'000U);
  faults_->release();
  while (stream.stats().units_read < 2) std::this_thread::sleep_for(1ms);
  const std::uint64_t spent = stream.stats().read_ns;  // both slots are full: nothing is being read
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(stream.stats().read_ns, spent);
}

TEST_F(StreamFaultTest, ATruncatedFileIsReported) {
  const Engine engine = make_engine();
  WeightStream stream = open_stream(engine);
  EXPECT_TRUE(cycle(stream).empty());
  ASSERT_EQ(::truncate(stored_.paths[0].c_str(), 1'000'000), 0);
  cycle(stream);  // units that were read ahead are still good
  const std::vector<Error> errors = cycle(stream);
  ASSERT_EQ(errors.size(), 2U);  // the fourth and the fifth
  for (const Error& error : errors) {
    EXPECT_EQ(error.kind, ErrorKind::end_of_file);
    EXPECT_EQ(error.path, stored_.paths[0]);
  }
}

TEST_F(StreamFaultTest, AModifiedFileIsCheckedAgain) {
  for (std::size_t unit = 0; unit < stored_.units.size(); ++unit) {
    stored_ = store_plain(make_engine(), std::vector<std::uint64_t>(5, 300'000));
    const Engine engine = make_engine();
    WeightStream stream = open_stream(engine);
    EXPECT_TRUE(cycle(stream).empty());
    flip(unit, 1234);
    std::vector<Error> errors;
    // Units that were read ahead of the change may still be good once.
    for (int round = 0; round < 2; ++round) errors = cycle(stream);
    ASSERT_EQ(errors.size(), 1U);
    EXPECT_EQ(errors[0].kind, ErrorKind::corrupt);
    EXPECT_NE(errors[0].message.find(stored_.units[unit].name), std::string::npos);
  }
}

TEST_F(StreamFaultTest, ATouchedFileIsNotAnError) {
  const Engine engine = make_engine();
  WeightStream stream = open_stream(engine);
  EXPECT_TRUE(cycle(stream).empty());
  const std::uint64_t before = stream.stats().verify_ns;
  ASSERT_EQ(::chmod(stored_.paths[0].c_str(), 0600), 0);
  for (int round = 0; round < 2; ++round) EXPECT_TRUE(cycle(stream).empty());
  EXPECT_GT(stream.stats().verify_ns, before);
}

TEST_F(StreamFaultTest, WithoutChecksumsAModifiedFileIsRejected) {
  for (StreamUnit& unit : stored_.units) unit.parts[0].checksum.reset();
  const Engine engine = make_engine();
  WeightStream stream = open_stream(engine);
  EXPECT_TRUE(cycle(stream).empty());
  flip(2, 5);
  cycle(stream);
  EXPECT_EQ(cycle(stream).size(), 5U);
}

TEST_F(StreamFaultTest, AFileThatIsReadLaterIsWatchedFromTheBeginning) {
  const auto other = store_plain(make_engine(), {300'000});  // in a separate file
  const std::string later = root_.file("later");
  ASSERT_EQ(::rename(other.paths[0].c_str(), later.c_str()), 0);
  stored_ = store_plain(make_engine(), std::vector<std::uint64_t>(5, 300'000));
  stored_.paths.push_back(later);
  stored_.units[4].parts[0] = {.file = 1, .offset = 0, .bytes = 300'000, .at = 0, .checksum = {}};
  stored_.contents[4] = other.contents[0];
  const Engine engine = make_engine();
  WeightStream stream = open_stream(engine);  // with room for two units
  std::fstream(later, std::ios::binary | std::ios::in | std::ios::out).put(char(~char(other.contents[0][0])));
  const struct timespec times[2] = {{.tv_sec = 1, .tv_nsec = 0}, {.tv_sec = 1, .tv_nsec = 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, later.c_str(), times, 0),
            0);  // independent of the kernel's clock granularity
  const auto memory = stream.acquire(4);
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().kind, ErrorKind::corrupt);
  EXPECT_EQ(memory.error().path, later);
}

TEST_F(StreamFaultTest, AFlippedBitIsFoundInTheFirstCycle) {
  for (const StreamVerify verify : {StreamVerify::once, StreamVerify::always}) {
    for (const std::uint64_t memory : {2U * 303'104U, 10U * 303'104U}) {
      stored_ = store_plain(make_engine(), std::vector<std::uint64_t>(5, 300'000));
      flip(3, 299'999);
      const Engine engine = make_engine();
      WeightStream stream = open_stream(engine, verify, memory);
      for (int round = 0; round < 2; ++round) {
        const std::vector<Error> errors = cycle(stream);
        ASSERT_EQ(errors.size(), 1U);
        EXPECT_EQ(errors[0].kind, ErrorKind::corrupt);
        EXPECT_NE(errors[0].message.find("unit 3"), std::string::npos);
      }
    }
  }
}

}  // namespace
}  // namespace trunkline
