#include "checkpoint/home_record.h"

#include <gtest/gtest.h>

namespace trunkline::checkpoint {
namespace {

TEST(HomeRecord, IsReadAsItWasWritten) {
  for (const std::string path : {"/", "/a b\n\"c\"", "/\xff\xfe"}) {
    const Home home{.path = path, .device = 1, .inode = ~0ULL};
    const auto read = parse_home(format_home(home), "volume/home");
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(*read, home);
  }
}

TEST(HomeRecord, ACutOrChangedByteIsFound) {
  const std::string text = format_home({.path = "/data/run", .device = 12, .inode = 345});
  for (std::size_t at = 0; at < text.size(); ++at) {
    EXPECT_FALSE(parse_home(text.substr(0, at), "home")) << at;
    for (const int bit : {1, 4, 32}) {
      std::string changed = text;
      changed[at] = static_cast<char>(changed[at] ^ bit);
      EXPECT_FALSE(parse_home(changed, "home")) << at;
    }
  }
}

TEST(HomeRecord, MessagesDoNotHoldTheWholeFile) {
  const auto read = parse_home("trunkline home " + std::string(1'000'000, '9'), "volume/home");
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().kind, ErrorKind::format);
  EXPECT_LT(read.error().message.size(), 1000U);
}

}  // namespace
}  // namespace trunkline::checkpoint
