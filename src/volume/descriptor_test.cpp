#include "volume/descriptor.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace trunkline::volume {
namespace {

const std::string kId = "00112233445566778899aabbccddeeff";

// A valid descriptor with `from` replaced by `to`.
std::string with(std::string_view from, std::string_view to) {
  std::string text = format_descriptor({kId, 1, 4, 1 << 20});
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Descriptor, IsReadBackAsWritten) {
  for (const Descriptor& descriptor :
       {Descriptor{kId, 0, 1, kMinStripeBytes}, Descriptor{kId, 1023, kMaxMembers, kMaxStripeBytes},
        Descriptor{random_id(), 2, 3, 12288}}) {
    const std::string text = format_descriptor(descriptor);
    EXPECT_LE(text.size(), kMaxDescriptorBytes);
    const auto parsed = parse_descriptor(text, "x.stripe");
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(*parsed, descriptor);
  }
}

TEST(Descriptor, WhiteSpaceAndOrderDoNotMatter) {
  const auto parsed = parse_descriptor("\n{\"stripe_bytes\":4096,\"members\":2,\"member\":1,\"id\":\"" + kId +
                                           "\",\"version\":1,\t\"format\":\"trunkline-stripe\"}  ",
                                       "x.stripe");
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(*parsed, (Descriptor{kId, 1, 2, 4096}));
}

TEST(Descriptor, EverythingElseIsAFormatErrorThatNamesTheFileAndTheReason) {
  struct Case {
    std::string text;
    std::string_view why;
  };
  const std::string valid = format_descriptor({kId, 1, 4, 1 << 20});
  const Case cases[] = {
      {"", "flat JSON object"},
      {"[]", "flat JSON object"},
      {"null", "flat JSON object"},
      {"{}", "\"format\""},
      {valid.substr(0, valid.size() / 2), "flat JSON object"},
      {valid + "x", "flat JSON object"},
      {std::string(1, '\0') + valid, "flat JSON object"},
      {valid + std::string(1, '\0') + valid, "flat JSON object"},
      {valid + std::string(kMaxDescriptorBytes, ' '), "longer than"},
      {std::string(2000, '[') + std::string(2000, ']'), "flat JSON object"},
      {std::string(4000, '['), "flat JSON object"},
      {with("\"member\": 1", "\"member\": [1]"), "flat JSON object"},
      {with("\"member\": 1", "\"member\": {\"a\": 1}"), "flat JSON object"},
      {with("\"member\": 1", "\"member\": 1, \"member\": 2"), "flat JSON object"},
      {with("trunkline-stripe", "trunkline-pack"), "\"format\""},
      {with("\"trunkline-stripe\"", "1"), "\"format\""},
      {with("\"version\": 1", "\"version\": 0"), "\"version\""},
      {with("\"version\": 1", "\"version\": -1"), "\"version\""},
      {with("\"version\": 1", "\"version\": 1.0"), "\"version\""},
      {with("\"version\": 1", "\"version\": \"1\""), "\"version\""},
      {with("\"version\": 1,", ""), "\"version\""},
      {with("\"version\": 1", "\"version\": 1, \"colour\": 2"), "\"colour\""},
      {with(kId, kId.substr(1)), "\"id\""},
      {with(kId, kId + "0"), "\"id\""},
      {with("aabb", "AABB"), "\"id\""},
      {with("aabb", "gggg"), "\"id\""},
      {with("\"" + kId + "\"", "17"), "\"id\""},
      {with("\"members\": 4", "\"members\": 0"), "\"members\""},
      {with("\"members\": 4", "\"members\": 1025"), "\"members\""},
      {with("\"members\": 4", "\"members\": 18446744073709551616"), "\"members\""},
      {with("\"members\": 4", "\"members\": 4294967298"), "\"members\""},
      {with("\"member\": 1", "\"member\": 4"), "\"member\""},
      {with("\"member\": 1", "\"member\": -1"), "\"member\""},
      {with("\"member\": 1", "\"member\": true"), "\"member\""},
      {with("1048576", "0"), "\"stripe_bytes\""},
      {with("1048576", "4095"), "\"stripe_bytes\""},
      {with("1048576", "6000"), "\"stripe_bytes\""},
      {with("1048576", "1073745920"), "\"stripe_bytes\""},
      {with("1048576", "1e6"), "\"stripe_bytes\""},
  };
  for (const auto& [text, why] : cases) {
    const auto parsed = parse_descriptor(text, "/d/x.stripe");
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error().kind, ErrorKind::format);
    EXPECT_EQ(parsed.error().path, "/d/x.stripe");
    EXPECT_NE(parsed.error().message.find("/d/x.stripe"), std::string::npos);
    EXPECT_NE(parsed.error().message.find(why), std::string::npos) << text << ": " << parsed.error().message;
  }
}

TEST(Descriptor, ANewerVersionSaysToUpgradeRegardlessOfItsOtherFields) {
  for (const std::string& text : {with("\"version\": 1", "\"version\": 2, \"parity\": 1"),
                                  std::string("{\"format\":\"trunkline-stripe\",\"version\":4711}")}) {
    const auto parsed = parse_descriptor(text, "x.stripe");
    ASSERT_FALSE(parsed);
    EXPECT_EQ(parsed.error().kind, ErrorKind::format);
    EXPECT_NE(parsed.error().message.find("upgrade"), std::string::npos) << parsed.error().message;
  }
}

TEST(Descriptor, NoPrefixOfAValidOneIsAccepted) {
  const std::string valid = format_descriptor({kId, 1, 4, 1 << 20});
  for (std::size_t bytes = 0; bytes + 2 < valid.size(); ++bytes)
    EXPECT_FALSE(parse_descriptor(valid.substr(0, bytes), "x")) << bytes;
}

TEST(RandomId, IsNewEachTime) {
  std::set<std::string> ids;
  for (int i = 0; i < 100; ++i) {
    const std::string id = random_id();
    EXPECT_EQ(id.size(), 32U);
    ids.insert(id);
  }
  EXPECT_EQ(ids.size(), 100U);
}

}  // namespace
}  // namespace trunkline::volume
