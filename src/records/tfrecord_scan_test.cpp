#include "records/tfrecord_scan.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "records/window_reader.h"
#include "trunkline/checksum.h"

namespace trunkline::records {
namespace {

std::span<const std::byte> bytes_in(const std::string& text) { return std::as_bytes(std::span(text)); }

template <class T>
std::string stored(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

std::string record(const std::string& data) {
  const std::string length = stored(std::uint64_t{data.size()});
  return length + stored(masked_crc(crc32c(bytes_in(length)))) + data +
         stored(masked_crc(crc32c(bytes_in(data))));
}

// Counts what is read.
class CountingSource : public MemorySource {
 public:
  using MemorySource::MemorySource;
  Status read(std::uint64_t offset, std::span<std::byte> memory) override {
    read_bytes += memory.size();
    ++reads;
    return MemorySource::read(offset, memory);
  }
  void expect_random(bool random) override { is_random = random; }

  std::uint64_t read_bytes = 0;
  int reads = 0;
  bool is_random = false;
};

Result<Ranges> scan_records(const std::string& file, OnDamage on_damage = OnDamage::fail) {
  MemorySource source(bytes_in(file));
  return scan_tfrecords(source, "/d/a.tfrecord", {.on_damage = on_damage});
}

TEST(TfrecordScan, MasksAsTheFormatDoes) {
  // The length 0, whose masked checksum all empty records begin with.
  EXPECT_EQ(masked_crc(crc32c(bytes_in(std::string(8, '\0')))), 0x07980329U);
}

TEST(TfrecordScan, FindsRecordsWithTheirHeadsAndTails) {
  const auto found =
      scan_records(record("abc") + record("") + record(std::string(100000, 'x')) + record("z"));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->offsets, (std::vector<std::uint64_t>{0, 19, 35, 100051}));
  EXPECT_EQ(found->lengths, (std::vector<std::uint64_t>{19, 16, 100016, 17}));
  EXPECT_TRUE(scan_records("")->offsets.empty());
}

TEST(TfrecordScan, NamesTheByteOfATruncatedRecord) {
  const std::string file = record("abc") + record("defg");
  for (std::size_t bytes = 20; bytes < file.size(); ++bytes) {
    const auto found = scan_records(file.substr(0, bytes));
    ASSERT_FALSE(found) << bytes;
    EXPECT_EQ(found.error().kind, ErrorKind::corrupt);
    EXPECT_EQ(found.error().path, "/d/a.tfrecord");
    EXPECT_NE(found.error().message.find("at byte 19:"), std::string::npos) << found.error().message;
    const auto rest = scan_records(file.substr(0, bytes), OnDamage::skip);
    ASSERT_TRUE(rest);
    EXPECT_EQ(rest->offsets, (std::vector<std::uint64_t>{0}));
    ASSERT_EQ(rest->skipped.size(), 1U);
    EXPECT_EQ(rest->skipped[0].offset, 19U);
  }
}

TEST(TfrecordScan, DetectsEveryBitThatFlipsInALength) {
  const std::string file = record("abc") + record("defg");
  for (std::size_t bit = 0; bit < 12 * 8; ++bit) {
    std::string damaged = file;
    damaged[19 + bit / 8] = static_cast<char>(damaged[19 + bit / 8] ^ (1 << bit % 8));
    const auto found = scan_records(damaged);
    ASSERT_FALSE(found) << bit;
    EXPECT_EQ(found.error().kind, ErrorKind::corrupt);
  }
}

TEST(TfrecordScan, RejectsALengthThatOverflows) {
  const std::string length = stored(~std::uint64_t{0} - 3);
  const auto found =
      scan_records(length + stored(masked_crc(crc32c(bytes_in(length)))) + std::string(100, 'x'));
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().kind, ErrorKind::corrupt);
}

TEST(TfrecordScan, TellsOtherFilesFromDamagedOnes) {
  EXPECT_EQ(scan_records("this is a text file of another kind").error().kind, ErrorKind::format);
  EXPECT_EQ(scan_records("\x1f\x8b\x08" + std::string(40, 'x')).error().kind, ErrorKind::unsupported);
  EXPECT_EQ(scan_records("short").error().kind, ErrorKind::corrupt);
}

TEST(TfrecordScan, ReadsOnlyHeadsOfLargeRecords) {
  std::string file;
  for (int each = 0; each < 20; ++each) file += record(std::string(1000000, 'x'));
  CountingSource source(bytes_in(file));
  const auto found = scan_tfrecords(source, "a", {});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->offsets.size(), 20U);
  EXPECT_LT(source.read_bytes, 200000U);
  EXPECT_TRUE(source.is_random);
}

TEST(TfrecordScan, ReadsSmallRecordsInWindows) {
  std::string file;
  for (int each = 0; each < 10000; ++each) file += record(std::string(100, 'x'));
  CountingSource source(bytes_in(file));
  ASSERT_TRUE(scan_tfrecords(source, "a", {}));
  EXPECT_LT(source.reads, 20);
  EXPECT_FALSE(source.is_random);
}

TEST(TfrecordScan, CanBeStopped) {
  const std::string file = record("abc");
  MemorySource source(bytes_in(file));
  const std::atomic<bool> stop{true};
  const auto found = scan_tfrecords(source, "a", {.stop = &stop});
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().kind, ErrorKind::cancelled);
}

TEST(OpenSource, ReadsFilesAndNamesTheOnesThatAreMissing) {
  const auto missing = open_source("/nowhere/at/all");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ENOENT);
  const auto self = open_source("/proc/self/exe");
  ASSERT_TRUE(self);
  std::string magic(4, '\0');
  ASSERT_TRUE((*self)->read(0, std::as_writable_bytes(std::span(magic))));
  EXPECT_EQ(magic,
            "\x7f"
            "ELF");
  const Status beyond = (*self)->read((*self)->size() - 2, std::as_writable_bytes(std::span(magic)));
  ASSERT_FALSE(beyond);
  EXPECT_EQ(beyond.error().kind, ErrorKind::end_of_file);
}

}  // namespace
}  // namespace trunkline::records
