#include "checkpoint/store_descriptor.h"

#include <gtest/gtest.h>

namespace trunkline::checkpoint {
namespace {

const StoreDescriptor kDescriptor{.id = "0011223344556677",
                                  .volumes = {"/nvme0/run-0011223344556677", "/nvme1/run-0011223344556677"},
                                  .former_volumes = {"/old/run-0011223344556677"}};

std::string descriptor_with(std::string_view from, std::string_view to) {
  std::string text = *format_store_descriptor(kDescriptor);
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(StoreDescriptor, IsReadBackAsWritten) {
  for (const StoreDescriptor& descriptor :
       {kDescriptor, StoreDescriptor{.id = "0123456789abcdef", .volumes = {}},
        StoreDescriptor{
            .id = "0123456789abcdef", .volumes = {"/nvme0/run-0123456789abcdef"}, .first_commit = 7}}) {
    const auto parsed = parse_store_descriptor(*format_store_descriptor(descriptor), "d");
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(*parsed, descriptor);
  }
}

TEST(StoreDescriptor, FormerVolumesFollowTheOthers) {
  EXPECT_EQ(kDescriptor.all_volumes(),
            (std::vector<std::string>{"/nvme0/run-0011223344556677", "/nvme1/run-0011223344556677",
                                      "/old/run-0011223344556677"}));
}

TEST(StoreDescriptor, AnyFlippedBitCutOrAdditionalByteIsFound) {
  const std::string text = *format_store_descriptor(kDescriptor);
  for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    EXPECT_FALSE(parse_store_descriptor(flipped, "d")) << "bit " << bit;
  }
  for (std::size_t bytes = 0; bytes < text.size(); ++bytes)
    EXPECT_FALSE(parse_store_descriptor(text.substr(0, bytes), "d")) << bytes;
  EXPECT_FALSE(parse_store_descriptor(text + "\n", "d"));
}

TEST(StoreDescriptor, ErrorsNameTheFileAndTheReason) {
  struct Case {
    std::string text;
    ErrorKind kind;
    std::string_view why;
  };
  const Case cases[] = {
      {"", ErrorKind::format, "JSON"},
      {"{}", ErrorKind::format, "\"format\""},
      {descriptor_with("\"version\": 1", "\"version\": 3, \"x\": 1"), ErrorKind::format, "newer version"},
      {descriptor_with("\"version\": 1", "\"version\": 2"), ErrorKind::format, "\"first_commit\""},
      {descriptor_with("\"version\": 1", "\"version\": 2, \"first_commit\": -1"), ErrorKind::format,
       "\"first_commit\""},
      {descriptor_with("\"version\": 1", "\"version\": 2, \"first_commit\": 1"), ErrorKind::corrupt,
       "damaged or edited"},
      {descriptor_with("\"version\": 1", "\"version\": 1, \"first_commit\": 2"), ErrorKind::corrupt,
       "damaged or edited"},
      {descriptor_with("\"version\": 1", "\"version\": 0"), ErrorKind::format, "\"version\""},
      {descriptor_with("\"version\": 1", "\"version\": \"1\""), ErrorKind::format, "\"version\""},
      {descriptor_with("0011223344556677\"", "001122334455667\""), ErrorKind::format, "\"id\""},
      {descriptor_with("\"/nvme0/", "\"nvme0/"), ErrorKind::format, "\"volumes\""},
      {descriptor_with("\"/nvme0/", "\"/nvme2/"), ErrorKind::corrupt, "damaged or edited"},
      {descriptor_with("\"version\": 1", "\"version\": 1, \"x\": 1"), ErrorKind::corrupt,
       "damaged or edited"},
  };
  for (const auto& [text, kind, why] : cases) {
    const auto parsed = parse_store_descriptor(text, "/d/t.json");
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error().kind, kind) << text;
    EXPECT_EQ(parsed.error().path, "/d/t.json");
    EXPECT_NE(parsed.error().message.find(why), std::string::npos) << parsed.error().message;
  }
  EXPECT_EQ(format_store_descriptor({.id = kDescriptor.id, .volumes = {"/\xff"}}).error().kind,
            ErrorKind::invalid_argument);
}

TEST(StoreDescriptor, KnowsItsDirectoriesByTheirNames) {
  EXPECT_TRUE(kDescriptor.owns("/nvme0/run-0011223344556677"));
  EXPECT_FALSE(kDescriptor.owns("/nvme0/run-0011223344556678"));
  EXPECT_FALSE(kDescriptor.owns("/nvme0"));
  EXPECT_FALSE(kDescriptor.owns("."));
}

}  // namespace
}  // namespace trunkline::checkpoint
