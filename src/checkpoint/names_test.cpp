#include "checkpoint/names.h"

#include <gtest/gtest.h>

#include "checkpoint/manifest.h"

namespace trunkline::checkpoint {
namespace {

TEST(Names, AreReadBack) {
  EXPECT_EQ(step_directory(12), "step-00000012");
  EXPECT_EQ(manifest_file(4), "manifest-0000000004");
  EXPECT_EQ(shard_file(0, 4, "0123456789abcdef"), "shard-00000-of-00004-0123456789abcdef.safetensors");
  for (const std::uint64_t number : {std::uint64_t{1}, std::uint64_t{99'999'999}, std::uint64_t{100'000'000},
                                     std::uint64_t{12'345'678'901}, kMaxNumber}) {
    EXPECT_EQ(step_of(step_directory(number)), number);
    EXPECT_EQ(commit_of(manifest_file(number)), number);
    EXPECT_TRUE(is_shard_file(shard_file(number, number, random_hex(16))));
  }
  EXPECT_EQ(step_of(step_directory(0)), 0U);
}

TEST(Names, OtherNamesAreNotRecognized) {
  for (const char* name : {"", "step-", "step-12", "step-000000012", "step--0000012", "step-+0000012",
                           "Step-00000012", "step-00000012x", "step-0000001 ", "step-9223372036854775808",
                           "step-99999999999999999999", "xstep-00000012"})
    EXPECT_FALSE(step_of(name)) << name;
  for (const char* name :
       {"manifest-0000000000", "manifest-4", "manifest-00000000004", "manifest-0000000004.tmp"})
    EXPECT_FALSE(commit_of(name)) << name;
  for (const char* name :
       {"shard-0-of-00004-0123456789abcdef.safetensors", "shard-00000-of-00004-0123456789abcde.safetensors",
        "shard-00000-of-00004-0123456789ABCDEF.safetensors", "shard-00000-of-00004.safetensors",
        "shard-00000-of-00004-0123456789abcdef.pt", "shard-00000-of-00004-0123456789abcdef.safetensors.bak",
        "model-00000-of-00004-0123456789abcdef.safetensors", "shard-", "model.safetensors"})
    EXPECT_FALSE(is_shard_file(name)) << name;
  EXPECT_FALSE(is_shard_file("shard-" + std::string(300, '0') + "-of-00004-0123456789abcdef.safetensors"));
}

TEST(Names, FoldersOfRunsThatWereSetAside) {
  EXPECT_EQ(aside_directory("20260131T235959Z", 1), "aside-20260131T235959Z");
  EXPECT_EQ(aside_directory("20260131T235959Z", 2), "aside-20260131T235959Z-2");
  for (const char* name : {"aside-20260131T235959Z", "aside-20260131T235959Z-12"})
    EXPECT_TRUE(is_aside_directory(name)) << name;
  for (const char* name : {"aside", "aside-2026", "aside-20260131T235959", "aside-20260131T235959Z-",
                           "aside-20260131T235959Z-x", "aside-20260131x235959Z", "x-20260131T235959Z",
                           "aside-20260131T235959Z-1", "aside-20260131T235959Z-02"})
    EXPECT_FALSE(is_aside_directory(name)) << name;
  EXPECT_FALSE(is_aside_directory("aside-20260131T235959Z-" + std::string(300, '0') + "2"));
}

TEST(Names, RandomDigitsDiffer) {
  EXPECT_EQ(random_hex(16).size(), 16U);
  EXPECT_NE(random_hex(16), random_hex(16));
}

}  // namespace
}  // namespace trunkline::checkpoint
