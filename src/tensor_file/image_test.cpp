#include "tensor_file/image.h"

#include <gtest/gtest.h>

#include <limits>

namespace trunkline::tensor_file {
namespace {

std::byte memory[100];

Image image_of(std::vector<Extent> extents, std::vector<Sum> sums, std::vector<Patch> patches) {
  return {.path = "f",
          .bytes = 100,
          .extents = std::move(extents),
          .sums = std::move(sums),
          .patches = std::move(patches)};
}

TEST(Image, SortsAndFindsByPlace) {
  Image image = image_of({{.offset = 50, .memory = {memory, 10}}, {.offset = 0, .memory = {memory, 20}}},
                         {{.begin = 20, .end = 40}}, {{.offset = 60}, {.offset = 2}});
  ASSERT_TRUE(image.arrange());
  EXPECT_EQ(image.extents.front().offset, 0U);
  EXPECT_EQ(extents_in(image, 0, 50).size(), 1U);
  EXPECT_EQ(extents_in(image, 19, 51).size(), 2U);
  EXPECT_EQ(extents_in(image, 20, 50).size(), 0U);
  EXPECT_EQ(patches_in(image, 63, 64).size(), 1U);
  EXPECT_EQ(patches_in(image, 64, 100).size(), 0U);
}

TEST(Image, RefusesWhatIsWrong) {
  const std::vector<Image> wrong = {
      image_of({{.offset = 95, .memory = {memory, 10}}}, {}, {}),
      image_of({{.offset = std::numeric_limits<std::uint64_t>::max(), .memory = {memory, 10}}}, {}, {}),
      image_of({{.offset = 0, .memory = {memory, 10}}, {.offset = 9, .memory = {memory, 10}}}, {}, {}),
      image_of({}, {{.begin = 10, .end = 5}}, {}),
      image_of({}, {{.begin = 10, .end = 101}}, {}),
      image_of({}, {{.begin = 10, .end = 20}, {.begin = 19, .end = 30}}, {}),
      image_of({}, {}, {{.offset = 0, .sum = 0}}),
      image_of({}, {{.begin = 10, .end = 20}}, {{.offset = 7, .sum = 0}}),
      image_of({}, {{.begin = 10, .end = 20}}, {{.offset = 97, .sum = 0}}),
      image_of({}, {{.begin = 10, .end = 20}}, {{.offset = 30, .sum = 0}, {.offset = 33, .sum = 0}}),
      {.path = "f", .bytes = 1ULL << 63},
  };
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    Image image = wrong[i];
    const Status status = image.arrange();
    ASSERT_FALSE(status) << i;
    EXPECT_EQ(status.error().kind, ErrorKind::invalid_argument);
  }
}

}  // namespace
}  // namespace trunkline::tensor_file
