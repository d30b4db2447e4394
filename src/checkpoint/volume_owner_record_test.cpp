#include "checkpoint/volume_owner_record.h"

#include <gtest/gtest.h>

namespace trunkline::checkpoint {
namespace {

TEST(VolumeOwnerRecord, IsReadBackAsWritten) {
  for (const std::string path : {"/", "/a b\n\"c\"", "/\xff\xfe"}) {
    const VolumeOwner owner{.path = path, .device = 1, .inode = ~0ULL, .birth = 1'700'000'000'123'456'789};
    const auto read = parse_volume_owner(format_volume_owner(owner), "volume/home");
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(*read, owner);
  }
}

TEST(VolumeOwnerRecord, ATruncatedOrChangedRecordIsDetected) {
  const std::string text = format_volume_owner({.path = "/data/run", .device = 12, .inode = 345});
  for (std::size_t at = 0; at < text.size(); ++at) {
    EXPECT_FALSE(parse_volume_owner(text.substr(0, at), "home")) << at;
    for (const int bit : {1, 4, 32}) {
      std::string changed = text;
      changed[at] = static_cast<char>(changed[at] ^ bit);
      EXPECT_FALSE(parse_volume_owner(changed, "home")) << at;
    }
  }
}

TEST(VolumeOwnerRecord, Version1IsReadWithoutABirthTime) {
  const auto read = parse_volume_owner("trunkline home 1 crc32c=6010adf4\n7 345 /data/run\n", "home");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, (VolumeOwner{.path = "/data/run", .device = 7, .inode = 345}));
}

TEST(VolumeOwnerRecord, ACopyIsAnotherDirectoryButANewDeviceNumberIsNot) {
  const VolumeOwner owner{.path = "/a", .device = 1, .inode = 2, .birth = 3};
  EXPECT_TRUE(owner.is_same_directory({.path = "/b", .device = 9, .inode = 2, .birth = 3}));
  EXPECT_FALSE(owner.is_same_directory({.path = "/a", .device = 1, .inode = 2, .birth = 4}));
  EXPECT_FALSE(owner.is_same_directory({.path = "/a", .device = 1, .inode = 8, .birth = 3}));
  EXPECT_TRUE(owner.is_same_directory({.path = "/b", .device = 1, .inode = 2}));
  EXPECT_FALSE(owner.is_same_directory({.path = "/b", .device = 9, .inode = 2}));
}

TEST(VolumeOwnerRecord, MessagesDoNotContainTheWholeFile) {
  const auto read = parse_volume_owner("trunkline home " + std::string(1'000'000, '9'), "volume/home");
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().kind, ErrorKind::format);
  EXPECT_LT(read.error().message.size(), 1000U);
}

}  // namespace
}  // namespace trunkline::checkpoint
