#include "base/crc_fold.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "trunkline/checksum.h"

namespace trunkline {
namespace {

using Folded = std::array<std::byte, kFoldedBytes>;

// The CRC register after `bytes`, computed bit by bit.
std::uint32_t register_after(std::span<const std::byte> bytes, std::uint32_t state,
                             std::uint32_t polynomial) {
  for (const std::byte byte : bytes) {
    state ^= static_cast<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? polynomial : 0);
  }
  return state;
}

// A processor also supports all widths below its widest.
class CrcFold : public testing::TestWithParam<FoldWidth> {
 protected:
  void SetUp() override {
    if (GetParam() > widest_fold()) GTEST_SKIP() << "this processor has no instructions of this width";
  }
};

TEST_P(CrcFold, LeavesTheSameRegisterAndCopies) {
  std::mt19937_64 random(11);
  std::vector<std::byte> source(8000);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  alignas(kFoldedCopyAlignment) std::array<std::byte, 8192> target;
  for (const std::uint32_t polynomial : {kCastagnoli, kIsoHdlc}) {
    const FoldConstants constants = fold_constants(polynomial);
    for (std::size_t length = 0; length < 7900; length += length < 1400 ? 1 : 97) {
      const auto bytes = std::span<const std::byte>(source).subspan(random() % 64, length);
      const auto state = static_cast<std::uint32_t>(random());
      Folded folded;
      const std::size_t done = fold(bytes, state, constants, folded, GetParam());
      ASSERT_LE(done, length);
      ASSERT_EQ(done == 0, length < 8 * kFoldedBytes || GetParam() == FoldWidth::none) << length;
      target.fill(std::byte{0xA5});
      Folded copied_folded;
      ASSERT_EQ(fold_and_copy(bytes, state, constants, copied_folded, target.data(), GetParam()), done);
      if (done == 0) continue;
      ASSERT_LT(length - done, kFoldedBytes);
      ASSERT_EQ(register_after(folded, 0, polynomial), register_after(bytes.first(done), state, polynomial))
          << length;
      ASSERT_EQ(folded, copied_folded);
      ASSERT_TRUE(std::ranges::equal(bytes.first(done), std::span(target).first(done))) << length;
      ASSERT_TRUE(std::ranges::all_of(std::span(target).subspan(done), [](std::byte byte) {
        return byte == std::byte{0xA5};
      })) << length;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Widths, CrcFold,
                         testing::Values(FoldWidth::none, FoldWidth::bits256, FoldWidth::bits512));

}  // namespace
}  // namespace trunkline
