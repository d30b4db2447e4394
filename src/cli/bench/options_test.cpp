#include "cli/bench/options.h"

#include <gtest/gtest.h>

namespace trunkline::cli {
namespace {

using Modes = std::vector<WriteMode>;

TEST(BenchOptions, WriteModesKeepTheirOrder) {
  EXPECT_EQ(parse_write_modes("fresh"), Modes{WriteMode::fresh});
  EXPECT_EQ(parse_write_modes("overwrite,fresh"), (Modes{WriteMode::overwrite, WriteMode::fresh}));
  EXPECT_EQ(BenchOptions{}.write_modes, *parse_write_modes("fresh,preallocated,overwrite"));
}

TEST(BenchOptions, InvalidWriteModesAreRejected) {
  for (const char* text : {"", "fresh,", "Fresh", "fresh;overwrite", "fresh,fresh"}) {
    const auto modes = parse_write_modes(text);
    ASSERT_FALSE(modes.has_value()) << text;
    EXPECT_EQ(modes.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(modes.error().message.find("--write-mode"), std::string::npos);
  }
}

TEST(BenchOptions, MemoryKindsAndDirectPolicies) {
  EXPECT_EQ(parse_memory("ordinary"), MemoryKind::ordinary);
  EXPECT_EQ(parse_memory("aligned"), MemoryKind::aligned);
  EXPECT_FALSE(parse_memory("pinned").has_value());
  EXPECT_EQ(parse_direct("auto"), Direct::automatic);
  EXPECT_EQ(parse_direct("always"), Direct::always);
  EXPECT_EQ(parse_direct("never"), Direct::never);
  EXPECT_FALSE(parse_direct("yes").has_value());
}

TEST(BenchOptions, MissingDevicesAndPeersAreExplained) {
  using Ordinal = std::optional<unsigned>;
  EXPECT_EQ(parse_device("cpu").value(), Ordinal());
  EXPECT_EQ(parse_device("cuda").value(), Ordinal(0));
  EXPECT_EQ(parse_device("cuda:12").value(), Ordinal(12));
  for (const char* text : {"tpu", "", "cuda:", "cuda:-1", "cuda:1x", "cuda:99999999999"}) {
    const auto device = parse_device(text);
    ASSERT_FALSE(device) << text;
    EXPECT_NE(device.error().message.find("cpu, cuda"), std::string::npos);
  }
  EXPECT_TRUE(parse_peers("fio")->fio);
  EXPECT_FALSE(parse_peers("fio")->gdsio);
  EXPECT_TRUE(parse_peers("fio,gdsio")->gdsio);
  EXPECT_NE(parse_peers("dd").error().message.find("fio, gdsio"), std::string::npos);
  EXPECT_FALSE(parse_peers("fio,fio").has_value());
  EXPECT_FALSE(parse_peers("").has_value());
}

TEST(BenchOptions, DurationsAreUpToADay) {
  EXPECT_EQ(parse_duration("30"), 30);
  EXPECT_EQ(parse_duration("2min"), 120);
  for (const char* text : {"x", "nan", "-1", "25h"}) {
    const auto seconds = parse_duration(text);
    ASSERT_FALSE(seconds.has_value()) << text;
    EXPECT_TRUE(seconds.error().message.starts_with("--duration: ")) << seconds.error().message;
  }
}

TEST(BenchOptions, BlocksAreMultiplesOf4096) {
  EXPECT_EQ(parse_block_range("112KiB")->most_bytes, 112 * kKiB);
  EXPECT_EQ(parse_block_range("1GiB")->most_bytes, kGiB);
  EXPECT_EQ(parse_block_range("4KiB")->least_bytes, 4 * kKiB);
  EXPECT_EQ(parse_block_range("4KiB-64KiB")->least_bytes, 4 * kKiB);
  EXPECT_EQ(parse_block_range("4KiB-64KiB")->most_bytes, 64 * kKiB);
  for (const char* text :
       {"", "0", "512", "1MB", "2GiB", "-4096", "a lot", "4KiB-", "64KiB-4KiB", "4KiB-4KiB", "12KiB-64KiB"}) {
    EXPECT_FALSE(parse_block_range(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace trunkline::cli
