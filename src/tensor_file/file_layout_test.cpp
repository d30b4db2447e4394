#include "tensor_file/file_layout.h"

#include <gtest/gtest.h>

#include <limits>

namespace trunkline::tensor_file {
namespace {

std::byte memory[100];

FileLayout layout_of(std::vector<Extent> extents, std::vector<Checksum> checksums,
                     std::vector<ChecksumField> checksum_fields) {
  return {.path = "f",
          .bytes = 100,
          .extents = std::move(extents),
          .checksums = std::move(checksums),
          .checksum_fields = std::move(checksum_fields)};
}

TEST(FileLayout, SortsAndFindsByPosition) {
  FileLayout layout =
      layout_of({{.offset = 50, .memory = {memory, 10}}, {.offset = 0, .memory = {memory, 20}}},
                {{.begin = 20, .end = 40}}, {{.offset = 60}, {.offset = 2}});
  ASSERT_TRUE(layout.arrange());
  EXPECT_EQ(layout.extents.front().offset, 0U);
  EXPECT_EQ(extents_in(layout, 0, 50).size(), 1U);
  EXPECT_EQ(extents_in(layout, 19, 51).size(), 2U);
  EXPECT_EQ(extents_in(layout, 20, 50).size(), 0U);
  EXPECT_EQ(checksum_fields_in(layout, 63, 64).size(), 1U);
  EXPECT_EQ(checksum_fields_in(layout, 64, 100).size(), 0U);
}

TEST(FileLayout, RejectsInvalidLayouts) {
  const std::vector<FileLayout> wrong = {
      layout_of({{.offset = 95, .memory = {memory, 10}}}, {}, {}),
      layout_of({{.offset = std::numeric_limits<std::uint64_t>::max(), .memory = {memory, 10}}}, {}, {}),
      layout_of({{.offset = 0, .memory = {memory, 10}}, {.offset = 9, .memory = {memory, 10}}}, {}, {}),
      layout_of({}, {{.begin = 10, .end = 5}}, {}),
      layout_of({}, {{.begin = 10, .end = 101}}, {}),
      layout_of({}, {{.begin = 10, .end = 20}, {.begin = 19, .end = 30}}, {}),
      layout_of({}, {}, {{.offset = 0, .checksum = 0}}),
      layout_of({}, {{.begin = 10, .end = 20}}, {{.offset = 7, .checksum = 0}}),
      layout_of({}, {{.begin = 10, .end = 20}}, {{.offset = 97, .checksum = 0}}),
      layout_of({}, {{.begin = 10, .end = 20}},
                {{.offset = 30, .checksum = 0}, {.offset = 33, .checksum = 0}}),
      {.path = "f", .bytes = 1ULL << 63},
  };
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    FileLayout layout = wrong[i];
    const Status status = layout.arrange();
    ASSERT_FALSE(status) << i;
    EXPECT_EQ(status.error().kind, ErrorKind::invalid_argument);
  }
}

}  // namespace
}  // namespace trunkline::tensor_file
