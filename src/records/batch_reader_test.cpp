// Batches that are read ahead, compared with the files' bytes: on every backend, disturbed or not.
#include "records/batch_reader.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "records/tfrecord_framing.h"
#include "support/engines.h"
#include "support/temp_directory.h"
#include "trunkline/checksum.h"

namespace trunkline::records {
namespace {

using test::TempDirectory;

constexpr std::chrono::seconds kLong{60};

// Files of random bytes, and samples in them: a table of any sizes, or uniform ones.
class DataSet {
 public:
  explicit DataSet(const TempDirectory& directory) : directory_(directory) {}

  void add_file(const std::string& contents,
                const std::vector<std::pair<std::uint64_t, std::uint64_t>>& samples) {
    const std::string path = directory_.file("data" + std::to_string(contents_.size()));
    std::ofstream(path, std::ios::binary) << contents;
    contents_.push_back(contents);
    paths_ += path;
    ends_.push_back(paths_.size());
    sizes_.push_back(contents.size());
    for (const auto& [offset, length] : samples) {
      offsets_.push_back(offset);
      lengths_.push_back(length);
      expected_.push_back(contents.substr(offset, length));
    }
    firsts_.push_back(offsets_.size());
  }

  void add_random_file(std::mt19937_64& random, std::uint64_t bytes, std::size_t samples,
                       std::uint64_t largest) {
    std::string contents(bytes, '\0');
    for (char& each : contents) each = static_cast<char>(random());
    std::vector<std::pair<std::uint64_t, std::uint64_t>> places;
    std::uint64_t next = 0;
    for (std::size_t index = 0; index < samples; ++index) {
      const std::uint64_t offset = random() % 3 == 0 ? next : random() % bytes;
      const std::uint64_t length = std::min(random() % (largest + 1), bytes - std::min(offset, bytes));
      places.emplace_back(std::min(offset, bytes), length);
      next = std::min(offset, bytes) + length;
    }
    add_file(contents, places);
  }

  std::shared_ptr<SampleTable> table() const {
    auto table = std::make_shared<SampleTable>();
    table->path_blob = {paths_.data(), paths_.size()};
    table->path_ends = ends_;
    table->first_samples = firsts_;
    table->sizes = sizes_;
    table->offsets = offsets_;
    table->lengths = lengths_;
    EXPECT_TRUE(table->check());
    return table;
  }

  // With the times and inodes that the files have now, some time after they were written.
  std::shared_ptr<SampleTable> stamped_table() {
    for (std::size_t file = 0; file < contents_.size(); ++file) {
      const timespec old[2] = {{.tv_sec = 1'000'000'000, .tv_nsec = 0},
                               {.tv_sec = 1'000'000'000, .tv_nsec = 0}};
      EXPECT_EQ(::utimensat(AT_FDCWD, path(file).c_str(), old, 0), 0);
      struct stat status{};
      EXPECT_EQ(::stat(path(file).c_str(), &status), 0);
      mtimes_ns_.push_back(std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000);
      inodes_.push_back(status.st_ino);
    }
    auto stamped = table();
    stamped->mtimes_ns = mtimes_ns_;
    stamped->inodes = inodes_;
    return stamped;
  }

  void overwrite(std::size_t file, std::uint64_t offset, char with) const {
    std::fstream stream(path(file), std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(static_cast<std::streamoff>(offset)).put(with);
  }

  const std::string& expected(std::uint64_t sample) const { return expected_[sample]; }
  std::string path(std::size_t file) const { return directory_.file("data" + std::to_string(file)); }

 private:
  const TempDirectory& directory_;
  std::vector<std::string> contents_;
  std::string paths_;
  std::vector<std::uint64_t> ends_, firsts_{0}, sizes_, offsets_, lengths_, inodes_;
  std::vector<std::int64_t> mtimes_ns_;
  std::vector<std::string> expected_;
};

std::string text_of(const Batch& batch, const PlacedRange& range) {
  return {reinterpret_cast<const char*>(batch.memory.data()) + range.position, range.length};
}

// On disk: the memory backend has files of its own.
class BatchReaderTest : public testing::TestWithParam<std::tuple<BackendKind, bool>> {
 protected:
  void SetUp() override {
    const auto [kind, disturbed] = GetParam();
    options_ = test::small_engine(kind, disturbed, 16);
    options_.pinned_budget_bytes = 64 * kMiB;
    auto engine = Engine::create(options_);
    if (!engine) GTEST_SKIP() << engine.error().message;
    engine_ = *engine;
  }

  BatchReaderOptions options(std::uint64_t samples, std::uint64_t batch_size) {
    return {.order = {.samples = samples, .batch_size = batch_size, .seed = 5}, .begin = {}};
  }

  EngineOptions options_;
  Engine engine_;
  TempDirectory directory_;
  std::mt19937_64 random_{7};
};

TEST_P(BatchReaderTest, EveryEpochYieldsTheBytesOfEverySample) {
  for (const std::uint64_t largest : {300, 5'000, 70'000}) {
    DataSet data(directory_);
    for (int file = 0; file < 3; ++file)
      data.add_random_file(random_, 200'000 + random_() % 9'000, 40, largest);
    const auto table = data.table();
    for (const std::uint64_t block : {0, 1, 6}) {
      BatchReaderOptions wanted = options(120, 7);
      wanted.order.block = block;
      wanted.slots = 2 + static_cast<unsigned>(block % 3);
      BatchReader reader(engine_, table, std::nullopt, wanted);
      std::map<std::uint64_t, int> seen;
      for (int step = 0; step < 36; ++step) {  // two epochs
        auto batch = reader.next(kLong);
        ASSERT_TRUE(batch) << batch.error().message;
        ASSERT_TRUE(*batch);
        ASSERT_EQ((*batch)->step.begin.epoch, step / 18);
        for (std::size_t index = 0; index < (*batch)->samples.size(); ++index) {
          const std::uint64_t sample = (*batch)->samples[index];
          ++seen[sample];
          ASSERT_EQ(text_of(**batch, (*batch)->ranges[index]), data.expected(sample)) << sample;
        }
      }
      ASSERT_EQ(seen.size(), 120U);
      for (const auto& [sample, times] : seen) ASSERT_EQ(times, 2) << sample;
    }
  }
}

TEST_P(BatchReaderTest, ABatchThatIsHeldIsNotOverwritten) {
  DataSet data(directory_);
  data.add_random_file(random_, 300'000, 64, 6'000);
  BatchReader reader(engine_, data.table(), std::nullopt, options(64, 8));
  std::vector<Batch> held;
  for (int index = 0; index < 2; ++index) {
    auto batch = reader.next(kLong);
    ASSERT_TRUE(batch) << batch.error().message;
    held.push_back(std::move(**batch));
  }
  const auto none = reader.next(std::chrono::milliseconds(50));
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().kind, ErrorKind::timed_out);
  EXPECT_TRUE(reader.all_slots_held());
  for (const Batch& batch : held) {
    for (std::size_t index = 0; index < batch.samples.size(); ++index)
      ASSERT_EQ(text_of(batch, batch.ranges[index]), data.expected(batch.samples[index]));
  }
  held.pop_back();
  EXPECT_TRUE(reader.next(kLong));
  reader.close();
  for (std::size_t index = 0; index < held[0].samples.size(); ++index)
    ASSERT_EQ(text_of(held[0], held[0].ranges[index]), data.expected(held[0].samples[index]));
  EXPECT_GT(engine_.stats().pinned_bytes, 0U);
  held.clear();
}

TEST_P(BatchReaderTest, ReleasesItsMemory) {
  DataSet data(directory_);
  data.add_random_file(random_, 6'000'000, 64, 3'000'000);
  constexpr std::uint64_t kOfLanes = 4 * kMiB;  // their slots, which stay
  {
    BatchReader reader(engine_, data.table(), std::nullopt, options(64, 10));
    auto batch = reader.next(kLong);
    ASSERT_TRUE(batch) << batch.error().message;
    EXPECT_GT(engine_.stats().pinned_bytes, kOfLanes);
  }
  EXPECT_LE(engine_.stats().pinned_bytes, kOfLanes);
}

TEST_P(BatchReaderTest, SharesHaveAllBatchesInTurn) {
  DataSet data(directory_);
  data.add_random_file(random_, 100'000, 50, 900);
  const auto table = data.table();
  std::vector<std::vector<std::uint64_t>> alone;
  BatchReaderOptions wanted = options(50, 4);
  wanted.one_epoch = true;
  BatchReader all(engine_, table, std::nullopt, wanted);
  for (auto batch = all.next(kLong); batch && *batch; batch = all.next(kLong))
    alone.push_back((*batch)->samples);
  ASSERT_EQ(alone.size(), 13U);
  wanted.shares = 3;
  for (wanted.share = 0; wanted.share < 3; ++wanted.share) {
    BatchReader reader(engine_, table, std::nullopt, wanted);
    for (std::size_t step = wanted.share; step < alone.size(); step += 3) {
      auto batch = reader.next(kLong);
      ASSERT_TRUE(batch && *batch);
      EXPECT_EQ((*batch)->samples, alone[step]);
    }
    auto end = reader.next(kLong);
    ASSERT_TRUE(end);
    EXPECT_FALSE(*end);
  }
}

TEST_P(BatchReaderTest, AFileThatChangedIsAnErrorOfItsBatch) {
  DataSet data(directory_);
  data.add_random_file(random_, 50'000, 20, 900);
  std::ofstream(data.path(0), std::ios::app) << "more";
  BatchReader reader(engine_, data.table(), std::nullopt, options(20, 4));
  for (int attempt = 0; attempt < 2; ++attempt) {
    const auto batch = reader.next(kLong);
    ASSERT_FALSE(batch);
    EXPECT_EQ(batch.error().kind, ErrorKind::corrupt);
    EXPECT_NE(batch.error().message.find("changed since it was indexed"), std::string::npos);
  }
}

TEST_P(BatchReaderTest, AFileThatChangesWhileItIsOpenIsAnError) {
  for (const bool skips : {false, true}) {
    TempDirectory directory;
    DataSet data(directory);
    for (int file = 0; file < 2; ++file) data.add_random_file(random_, 50'000, 10, 900);
    const auto table = data.stamped_table();
    BatchReaderOptions wanted = options(20, 20);
    wanted.reading.skip_damaged = skips;
    BatchReader reader(engine_, table, std::nullopt, wanted);
    ASSERT_TRUE(reader.next(kLong));
    data.overwrite(1, 17, 'x');
    // What was read ahead before is as it was.
    auto batch = reader.next(kLong);
    for (int more = 0; batch && (*batch)->skipped.empty() && more < 3; ++more) batch = reader.next(kLong);
    if (skips) {
      ASSERT_TRUE(batch) << batch.error().message;
      EXPECT_EQ((*batch)->skipped.size(), 10U);
      EXPECT_EQ((*batch)->samples.size(), 10U);
    } else {
      ASSERT_FALSE(batch);
      EXPECT_EQ(batch.error().kind, ErrorKind::corrupt);
      EXPECT_NE(batch.error().message.find("data1 has changed since it was indexed"), std::string::npos)
          << batch.error().message;
    }
  }
}

TEST_P(BatchReaderTest, ClosesInTheMiddleOfAnything) {
  DataSet data(directory_);
  data.add_random_file(random_, 2'000'000, 200, 60'000);
  const auto table = data.table();
  for (int round = 0; round < 60; ++round) {
    BatchReaderOptions wanted = options(200, 1 + random_() % 30);
    wanted.slots = 2 + static_cast<unsigned>(random_() % 3);
    BatchReader reader(engine_, table, std::nullopt, wanted);
    for (std::uint64_t batches = random_() % 4; batches > 0; --batches) ASSERT_TRUE(reader.next(kLong));
    if (random_() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 500));
    ASSERT_TRUE(reader.close());
    ASSERT_EQ(reader.next(kLong).error().kind, ErrorKind::closed);
  }
}

std::string framed(const std::string& payload) {
  const auto bytes = [](auto value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  const auto masked = [&](const std::string& text) {
    return bytes(masked_crc(crc32c(std::as_bytes(std::span(text)))));
  };
  const std::string length = bytes(std::uint64_t{payload.size()});
  return length + masked(length) + payload + masked(payload);
}

TEST_P(BatchReaderTest, RecordsAreVerifiedAndDamagedOnesSkipped) {
  std::string contents;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> places;
  std::vector<std::string> payloads;
  for (std::size_t index = 0; index < 30; ++index) {
    payloads.emplace_back(random_() % 3'000, static_cast<char>('a' + index % 26));
    const std::string record = framed(payloads.back());
    places.emplace_back(contents.size(), record.size());
    contents += record;
  }
  contents[places[11].first + 13] ^= 1;  // of the payload
  DataSet data(directory_);
  data.add_file(contents, places);
  BatchReaderOptions wanted = options(30, 30);
  wanted.reading.framing = Framing::tfrecord;
  wanted.order.block = 0;
  const auto table = data.table();
  BatchReader strict(engine_, table, std::nullopt, wanted);
  const auto failed = strict.next(kLong);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().kind, ErrorKind::corrupt);
  EXPECT_NE(failed.error().message.find("offset " + std::to_string(places[11].first)), std::string::npos);
  wanted.reading.skip_damaged = true;
  BatchReader lenient(engine_, table, std::nullopt, wanted);
  auto batch = lenient.next(kLong);
  ASSERT_TRUE(batch && *batch);
  ASSERT_EQ((*batch)->samples.size(), 29U);
  ASSERT_EQ((*batch)->skipped.size(), 1U);
  EXPECT_EQ((*batch)->skipped[0].sample, 11U);
  for (std::size_t index = 0; index < 29; ++index)
    EXPECT_EQ(text_of(**batch, (*batch)->ranges[index]), payloads[(*batch)->samples[index]]);
}

// Fewer files than a batch has may be open.
class FewDescriptors {
 public:
  explicit FewDescriptors(rlim_t count) {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit few = before_;
    few.rlim_cur = count;
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;
  ~FewDescriptors() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0); }

 private:
  rlimit before_{};
};

TEST_P(BatchReaderTest, BatchesHaveMoreFilesThanMayBeOpen) {
  const FewDescriptors few(300);
  for (const std::uint64_t largest : {300, 70'000}) {
    DataSet data(directory_);
    for (int file = 0; file < 130; ++file)
      data.add_random_file(random_, 2'000 + random_() % (2 * largest), 1 + file % 3, largest);
    const std::uint64_t samples = data.table()->sample_count();
    BatchReader reader(engine_, data.table(), std::nullopt, options(samples, 120));
    std::map<std::uint64_t, int> seen;
    while (seen.size() < samples) {
      auto batch = reader.next(kLong);
      ASSERT_TRUE(batch) << batch.error().message;
      ASSERT_EQ((*batch)->samples.size(), (*batch)->ranges.size());
      for (std::size_t index = 0; index < (*batch)->samples.size(); ++index) {
        const std::uint64_t sample = (*batch)->samples[index];
        ++seen[sample];
        ASSERT_EQ(text_of(**batch, (*batch)->ranges[index]), data.expected(sample)) << sample;
      }
    }
  }
}

TEST_P(BatchReaderTest, SamplesOfOneSizeInManyFilesAreNextToEachOther) {
  const FewDescriptors few(300);
  DataSet data(directory_);
  for (int file = 0; file < 130; ++file) data.add_file(std::string(501, static_cast<char>(file)), {{1, 500}});
  BatchReader reader(engine_, data.table(), std::nullopt, options(130, 130));
  auto batch = reader.next(kLong);
  ASSERT_TRUE(batch) << batch.error().message;
  ASSERT_EQ((*batch)->samples.size(), 130U);
  EXPECT_EQ((*batch)->memory.size(), 130U * 500);
  for (std::size_t index = 0; index < 130; ++index) {
    EXPECT_EQ((*batch)->ranges[index].position, index * 500);
    EXPECT_EQ(text_of(**batch, (*batch)->ranges[index]), data.expected((*batch)->samples[index]));
  }
}

TEST_P(BatchReaderTest, FilesOfManyThatAreGoneAreNamedOrSkipped) {
  const FewDescriptors few(300);
  DataSet data(directory_);
  for (int file = 0; file < 130; ++file) data.add_random_file(random_, 30'000, 1, 20'000);
  for (const std::size_t gone : {5, 64, 129}) std::filesystem::remove(data.path(gone));
  BatchReaderOptions wanted = options(130, 130);
  BatchReader strict(engine_, data.table(), std::nullopt, wanted);
  const auto failed = strict.next(kLong);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, ENOENT);
  EXPECT_NE(failed.error().message.find("data"), std::string::npos);
  wanted.reading.skip_damaged = true;
  BatchReader lenient(engine_, data.table(), std::nullopt, wanted);
  auto batch = lenient.next(kLong);
  ASSERT_TRUE(batch) << batch.error().message;
  EXPECT_EQ((*batch)->samples.size(), 127U);
  std::set<std::uint64_t> skipped;
  for (const SkippedSample& each : (*batch)->skipped) skipped.insert(each.sample);
  EXPECT_EQ(skipped, (std::set<std::uint64_t>{5, 64, 129}));
  for (std::size_t index = 0; index < 127; ++index)
    EXPECT_EQ(text_of(**batch, (*batch)->ranges[index]), data.expected((*batch)->samples[index]));
}

TEST_P(BatchReaderTest, ClosesWhileFilesOfManyAreOpened) {
  const FewDescriptors few(300);
  DataSet data(directory_);
  for (int file = 0; file < 130; ++file) data.add_random_file(random_, 30'000, 2, 20'000);
  for (int round = 0; round < 20; ++round) {
    BatchReader reader(engine_, data.table(), std::nullopt, options(260, 100 + random_() % 100));
    for (std::uint64_t batches = random_() % 2; batches > 0; --batches) ASSERT_TRUE(reader.next(kLong));
    ASSERT_TRUE(reader.close());
    ASSERT_EQ(reader.next(kLong).error().kind, ErrorKind::closed);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, BatchReaderTest,
                         testing::Combine(testing::Values(BackendKind::io_uring, BackendKind::libaio,
                                                          BackendKind::threads),
                                          testing::Bool()),
                         [](const auto& each) {
                           return std::string(to_string(std::get<0>(each.param))) +
                                  (std::get<1>(each.param) ? "Disturbed" : "");
                         });

// Fails reads of an engine, one after another: the batch fails, or only the samples that were read then.
TEST(BatchReaderFaults, AReadThatFailsIsAnErrorOrSkipped) {
  TempDirectory directory;
  std::mt19937_64 random(3);
  DataSet data(directory);
  data.add_random_file(random, 3'000'000, 40, 60'000);
  for (std::uint64_t command = 0; command < 12; ++command) {
    for (const bool skips : {false, true}) {
      EngineOptions options{.lanes = 1, .block_bytes = 64 * kKiB};
      options.faults = Faults::create();
      const Engine engine = Engine::create(options).value();
      BatchReaderOptions wanted{.order = {.samples = 40, .batch_size = 10, .block = 1, .seed = 2},
                                .begin = {}};
      wanted.reading.skip_damaged = skips;
      // Where samples are skipped, the reads that are tried again fail as well.
      options.faults->fail(Op::read, command, EIO, skips ? 200 : 1);
      BatchReader reader(engine, data.table(), std::nullopt, wanted);
      bool failed = false;
      std::size_t skipped = 0;
      for (int step = 0; step < 4 && !failed; ++step) {
        auto batch = reader.next(kLong);
        failed = !batch;
        if (!batch) {
          EXPECT_EQ(batch.error().code, EIO);
          continue;
        }
        skipped += (*batch)->skipped.size();
        for (std::size_t index = 0; index < (*batch)->samples.size(); ++index)
          ASSERT_EQ(text_of(**batch, (*batch)->ranges[index]), data.expected((*batch)->samples[index]));
      }
      EXPECT_EQ(failed, !skips) << command;
      EXPECT_EQ(skipped > 0, skips) << command;
    }
  }
}

}  // namespace
}  // namespace trunkline::records
