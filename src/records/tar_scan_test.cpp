#include "records/tar_scan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "records/tar_members.h"

namespace trunkline::records {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string padded(std::string data) {
  data.resize((data.size() + 511) / 512 * 512, '\0');
  return data;
}

struct Header {
  std::string name;
  char type = '0';
  std::string prefix = {};
  std::string size = {};  // as it is stored
  std::string magic = std::string(
      "ustar\0"
      "00",
      8);
};

std::string header(const Header& values, std::size_t bytes) {
  std::string block(512, '\0');
  const auto put = [&](std::size_t offset, const std::string& text) {
    std::memcpy(block.data() + offset, text.data(), text.size());
  };
  put(0, values.name);
  put(124, values.size.empty() ? fmt::format("{:011o}", bytes) : values.size);
  put(148, "        ");
  block[156] = values.type;
  put(257, values.magic);
  put(345, values.prefix);
  unsigned sum = 0;
  for (const char each : block) sum += static_cast<unsigned char>(each);
  put(148, fmt::format("{:06o}", sum) + std::string("\0 ", 2));
  return block;
}

std::string member(const Header& values, const std::string& data) {
  return header(values, data.size()) + padded(data);
}

std::string member(const std::string& name, const std::string& data) {
  return member(Header{.name = name}, data);
}

const std::string& end_marker() {
  static const std::string marker(1024, '\0');
  return marker;
}

Result<Ranges> scan(const std::string& file, OnDamage on_damage = OnDamage::fail) {
  MemorySource source(bytes_of(file));
  return scan_tar(source, "/d/a.tar", {.on_damage = on_damage});
}

// "KEY EXTENSION=DATA ..." of each sample.
std::vector<std::string> samples(const std::string& file) {
  const auto found = scan(file);
  if (!found) return {found.error().message};
  std::vector<std::string> shown;
  for (std::size_t index = 0; index < found->offsets.size(); ++index) {
    const std::string range = file.substr(found->offsets[index], found->lengths[index]);
    const auto sample = parse_tar_sample(bytes_of(range), "/d/a.tar");
    if (!sample) {
      shown.push_back(sample.error().message);
      continue;
    }
    shown.push_back(sample->key);
    for (const auto& part : sample->members)
      shown.back() += fmt::format(" {}={}", part.extension, range.substr(part.begin, part.bytes));
  }
  return shown;
}

using Strings = std::vector<std::string>;

TEST(SampleName, SplitsAtTheFirstDotOfTheLastComponent) {
  const auto shown = [](std::string_view name) {
    const auto found = sample_name(name);
    return found ? fmt::format("{}|{}", found->key, found->extension) : "none";
  };
  EXPECT_EQ(shown("a.jpg"), "a|jpg");
  EXPECT_EQ(shown("d.x/a.seg.png"), "d.x/a|seg.png");
  EXPECT_EQ(shown("./a."), "./a|");
  for (const char* name : {"a", "d.x/a", ".hidden", "d/.hidden.jpg", "__meta__/a.jpg", "__key__", ""})
    EXPECT_EQ(shown(name), "none") << name;
  EXPECT_EQ(shown("__a__.jpg"), "__a__|jpg");
}

TEST(TarScan, GroupsAdjacentMembersByKey) {
  const std::string file = member("a.jpg", "1") + member("a.cls", "") +
                           member("b.JPG", std::string(600, 'x')) + member("c/a.jpg", "3") + end_marker();
  EXPECT_EQ(samples(file), (Strings{"a jpg=1 cls=", "b jpg=" + std::string(600, 'x'), "c/a jpg=3"}));
  const auto found = scan(file);
  EXPECT_EQ(found->offsets, (std::vector<std::uint64_t>{0, 1536, 3072}));
  EXPECT_EQ(found->lengths, (std::vector<std::uint64_t>{1536, 1112, 513}));
}

TEST(TarScan, PassesOverWhatIsNotAFile) {
  const std::string file = member(Header{.name = "d/", .type = '5', .size = "00000001000"}, "") +
                           member("d/a.jpg", "1") + member(Header{.name = "latest", .type = '2'}, "") +
                           member("README", "text") + member(Header{.name = "d/a.fifo", .type = '6'}, "") +
                           member("d/a.cls", "2") +
                           member(Header{.name = "old/", .type = '\0', .magic = ""}, "") +
                           member(Header{.name = "e.jpg", .type = '\0', .magic = ""}, "3") + end_marker();
  EXPECT_EQ(samples(file), (Strings{"d/a jpg=1 cls=2", "e jpg=3"}));
}

TEST(TarScan, ReadsLongNamesOfGnuAndPax) {
  const std::string long_name(300, 'n');
  const std::string gnu = member(Header{.name = "././@LongLink", .type = 'L', .magic = "ustar  "},
                                 long_name + ".jpg" + std::string(1, '\0')) +
                          member(Header{.name = std::string(100, 'n'), .magic = "ustar  "}, "1");
  const std::string record = fmt::format("{} path={}.jpg\n", 310 + 6, "p" + std::string(299, 'n'));
  ASSERT_EQ(record.size(), 314U);
  const std::string pax_record = fmt::format("{} path={}.cls\n", 314, "p" + std::string(299, 'n'));
  const std::string pax = member(Header{.name = "x", .type = 'x'}, "12 mtime=1.5\n" + pax_record);
  EXPECT_NE(samples(gnu + pax + member("short", "2") + end_marker())[0].find("malformed"), std::string::npos);
  const std::string good = member(Header{.name = "x", .type = 'x'}, "13 mtime=1.5\n" + pax_record);
  EXPECT_EQ(samples(gnu + good + member("short", "2") + end_marker()),
            (Strings{long_name + " jpg=1", "p" + std::string(299, 'n') + " cls=2"}));
  EXPECT_EQ(samples(member(Header{.name = "a.jpg", .prefix = "some/folder"}, "1") + end_marker()),
            (Strings{"some/folder/a jpg=1"}));
}

TEST(TarScan, ReadsSizesOfBase256AndPax) {
  const std::string base256 = std::string("\x80\0\0\0\0\0\0\0\0\0\0\x03", 12);
  EXPECT_EQ(samples(member(Header{.name = "a.jpg", .size = base256}, "123") + end_marker()),
            (Strings{"a jpg=123"}));
  const std::string pax = member(Header{.name = "x", .type = 'x'}, "10 size=3\n");
  EXPECT_EQ(samples(pax + member(Header{.name = "a.jpg", .size = "00000000000"}, "123") + end_marker()),
            (Strings{"a jpg=123"}));
  for (const std::string& size :
       {std::string("\xff\0\0\0\0\0\0\0\0\0\0\x03", 12),
        std::string("\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", 12), std::string("0000000000x")}) {
    const auto found = scan(member(Header{.name = "a.jpg", .size = size}, "123") + end_marker());
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().kind, ErrorKind::format);
  }
}

TEST(TarScan, RejectsWhatWouldBeReadWrongly) {
  EXPECT_EQ(scan(member(Header{.name = "g", .type = 'g'}, "10 size=3\n") + end_marker()).error().kind,
            ErrorKind::unsupported);
  EXPECT_EQ(scan(member(Header{.name = "a.jpg", .type = 'S'}, "1") + end_marker()).error().kind,
            ErrorKind::unsupported);
  EXPECT_EQ(
      scan(member(Header{.name = "x", .type = 'x'}, "22 GNU.sparse.major=1\n") + end_marker()).error().kind,
      ErrorKind::unsupported);
  EXPECT_TRUE(scan(member(Header{.name = "g", .type = 'g'}, "13 comment=x\n") + end_marker()));
}

TEST(TarScan, RejectsLinksInSamples) {
  for (const char type : {'1', '2'}) {
    const std::string file = member("a.jpg", "1") + member("b.jpg", "2") +
                             member(Header{.name = "b.cls", .type = type}, "") + member("c.jpg", "3") +
                             end_marker();
    const auto found = scan(file);
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().kind, ErrorKind::unsupported);
    EXPECT_NE(found.error().message.find("at byte 2048: the member \"b.cls\" is a link"), std::string::npos)
        << found.error().message;
    EXPECT_NE(found.error().message.find("--hard-dereference"), std::string::npos) << found.error().message;
    const auto rest = scan(file, OnDamage::skip);
    ASSERT_TRUE(rest);
    EXPECT_EQ(rest->offsets, (std::vector<std::uint64_t>{0, 2560}));
    EXPECT_EQ(rest->skipped.size(), 1U);
    EXPECT_EQ(parse_tar_sample(bytes_of(file.substr(1024, 1536)), "a").error().kind, ErrorKind::corrupt);
  }
}

TEST(TarScan, ReadsConcatenatedArchives) {
  const std::string first = member("a.jpg", "1") + member("a.cls", "2") + std::string(10240 - 2048, '\0');
  const std::string second = member("b.jpg", "3") + end_marker();
  EXPECT_EQ(samples(first + second), (Strings{"a jpg=1 cls=2", "b jpg=3"}));
  EXPECT_EQ(samples(first + second + second.substr(1024) + member("c.jpg", "4") + end_marker()),
            (Strings{"a jpg=1 cls=2", "b jpg=3", "c jpg=4"}));
  EXPECT_EQ(samples(end_marker() + second), (Strings{"b jpg=3"}));
  EXPECT_EQ(samples(first + std::string(100, '\0')), (Strings{"a jpg=1 cls=2"}));
  // Members of one name in both would be parts of different samples.
  const auto divided = scan(first + member("a.txt", "3") + end_marker());
  ASSERT_FALSE(divided);
  EXPECT_EQ(divided.error().kind, ErrorKind::format);
  // The second one is truncated.
  EXPECT_EQ(scan(first + member("b.jpg", "3")).error().kind, ErrorKind::corrupt);
}

TEST(TarScan, RejectsAnythingElseAfterTheEndOfTheArchive) {
  const std::string archive = member("a.jpg", "1") + end_marker();
  for (const std::string& rest : {std::string("x"), std::string(600, 'x'), std::string(5000, 'x')}) {
    const auto found = scan(archive + rest);
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().kind, ErrorKind::corrupt);
    EXPECT_NE(found.error().message.find("at byte 2048: after the end of the archive"), std::string::npos)
        << found.error().message;
    const auto skipped = scan(archive + rest, OnDamage::skip);
    ASSERT_TRUE(skipped);
    EXPECT_EQ(skipped->offsets, (std::vector<std::uint64_t>{0}));
    EXPECT_EQ(skipped->skipped.size(), 1U);
  }
}

TEST(TarScan, DetectsATruncatedArchiveWhereverItEnds) {
  const std::string whole = member("a.jpg", "1") + member("a.cls", "2") + member("b.jpg", "3");
  for (std::size_t bytes = 0; bytes <= whole.size(); bytes += 100) {
    const auto found = scan(whole.substr(0, bytes));
    ASSERT_FALSE(found) << bytes;
    EXPECT_EQ(found.error().kind, ErrorKind::corrupt) << bytes;
    const auto rest = scan(whole.substr(0, bytes), OnDamage::skip);
    ASSERT_TRUE(rest) << bytes;
    EXPECT_EQ(rest->offsets.size(), bytes > 2560 ? 1U : 0U) << bytes;
    EXPECT_EQ(rest->skipped.size(), 1U);
  }
}

TEST(TarScan, DetectsADamagedHeader) {
  std::string file = member("a.jpg", "1") + member("b.jpg", "2") + member("c.jpg", "3") + end_marker();
  file[2048] = 'x';
  const auto found = scan(file);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().kind, ErrorKind::corrupt);
  EXPECT_NE(found.error().message.find("/d/a.tar: at byte 2048:"), std::string::npos);
  const auto rest = scan(file, OnDamage::skip);
  ASSERT_TRUE(rest);
  // b may have had more members.
  EXPECT_EQ(rest->offsets, (std::vector<std::uint64_t>{0}));
  EXPECT_EQ(scan(std::string(2000, 'x')).error().kind, ErrorKind::format);
  EXPECT_EQ(scan("\x1f\x8b" + std::string(2000, 'x')).error().kind, ErrorKind::unsupported);
}

TEST(TarScan, DetectsSamplesInTwoPlacesAndMembersThatAreDuplicated) {
  const std::string apart = member("a.jpg", "1") + member("b.jpg", "2") + member("a.cls", "3") + end_marker();
  EXPECT_EQ(scan(apart).error().kind, ErrorKind::format);
  EXPECT_NE(scan(apart).error().message.find("at byte 2048: "), std::string::npos);
  EXPECT_EQ(scan(apart, OnDamage::skip)->offsets, (std::vector<std::uint64_t>{0, 1024}));
  const std::string twice = member("a.jpg", "1") + member("a.JPG", "2") + member("a.jpg", "2") +
                            member("b.jpg", "3") + end_marker();
  EXPECT_EQ(scan(twice).error().kind, ErrorKind::format);
  const auto rest = scan(twice, OnDamage::skip);
  EXPECT_EQ(rest->offsets, (std::vector<std::uint64_t>{3072}));
  EXPECT_EQ(rest->skipped.size(), 1U);
}

TEST(TarSampleTest, RejectsBytesOfAnotherArchive) {
  EXPECT_EQ(parse_tar_sample(bytes_of(member("a.jpg", "1") + member("b.jpg", "2")), "a").error().kind,
            ErrorKind::corrupt);
  EXPECT_EQ(parse_tar_sample(bytes_of(std::string(1024, '\0')), "a").error().kind, ErrorKind::corrupt);
  EXPECT_FALSE(parse_tar_sample(bytes_of(std::string(100, 'x')), "a"));
}

}  // namespace
}  // namespace trunkline::records
