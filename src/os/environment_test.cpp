#include "os/environment.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

using test::TempDirectory;

TEST(FieldOf, MatchesTheWholeKey) {
  constexpr std::string_view kStatus = "Name:\tcat\nSeccomp:\t2\nSeccomp_filters:\t1\nno colon\nEmpty:\n";
  EXPECT_EQ(field_of(kStatus, "Seccomp"), "2");
  EXPECT_EQ(field_of(kStatus, "Seccomp_filters"), "1");
  EXPECT_EQ(field_of(kStatus, "Empty"), "");
  EXPECT_EQ(field_of(kStatus, "Seccom"), std::nullopt);
  EXPECT_EQ(field_of("model name\t: A CPU @ 2.5GHz\n", "model name"), "A CPU @ 2.5GHz");
}

TEST(MeminfoBytes, CountsKibibytes) {
  constexpr std::string_view kMeminfo = "MemTotal:       16384 kB\nHugePages_Total:  7\nBad:  x kB\n";
  EXPECT_EQ(meminfo_bytes(kMeminfo, "MemTotal"), 16384U * 1024);
  EXPECT_EQ(meminfo_bytes(kMeminfo, "HugePages_Total"), std::nullopt) << "a count, not kB";
  EXPECT_EQ(meminfo_bytes(kMeminfo, "Bad"), std::nullopt);
  EXPECT_EQ(meminfo_bytes(kMeminfo, "MemAvailable"), std::nullopt);
}

TEST(ChosenSetting, IsTheOneInBrackets) {
  EXPECT_EQ(chosen_setting("always [madvise] never\n"), "madvise");
  EXPECT_EQ(chosen_setting("[always] madvise never"), "always");
  EXPECT_EQ(chosen_setting(""), "");
  EXPECT_EQ(chosen_setting("always [madvise"), "");
}

TEST(HasIpcLock, NeedsTheCapabilityInTheInitialNamespace) {
  constexpr std::string_view kInitial = "         0          0 4294967295\n";
  constexpr std::string_view kAll = "CapPrm:\t0\nCapEff:\t000001ffffffffff\n";
  EXPECT_TRUE(has_ipc_lock(kAll, kInitial));
  EXPECT_TRUE(has_ipc_lock("CapEff:\t0000000000004000\n", kInitial));
  EXPECT_FALSE(has_ipc_lock("CapEff:\t00000000a80425fb\n", kInitial)) << "the usual set in a container";
  EXPECT_FALSE(has_ipc_lock("CapEff:\t0000000000000000\n", kInitial));
  EXPECT_FALSE(has_ipc_lock(kAll, "0 1000 1\n")) << "root of a user namespace";
  EXPECT_FALSE(has_ipc_lock("", kInitial));
}

TEST(MemoryLimitFiles, OfVersionTwoUpToTheTop) {
  EXPECT_EQ(memory_limit_files("0::/user.slice/a.scope\n"),
            (std::vector<std::string>{"/sys/fs/cgroup/user.slice/a.scope/memory.max",
                                      "/sys/fs/cgroup/user.slice/memory.max", "/sys/fs/cgroup/memory.max"}));
  EXPECT_EQ(memory_limit_files("0::/\n"), (std::vector<std::string>{"/sys/fs/cgroup/memory.max"}));
}

TEST(MemoryLimitFiles, OfVersionOneForTheMemoryControllerOnly) {
  EXPECT_EQ(memory_limit_files("5:cpu,cpuacct:/docker/x\n4:memory:/docker\n3:memory_like:/y\n"),
            (std::vector<std::string>{"/sys/fs/cgroup/memory/docker/memory.limit_in_bytes",
                                      "/sys/fs/cgroup/memory/memory.limit_in_bytes"}));
}

TEST(MemoryLimitFiles, TerminatesOnMalformedText) {
  EXPECT_TRUE(memory_limit_files("").empty());
  EXPECT_TRUE(memory_limit_files("nonsense\n1:memory\n").empty());
  EXPECT_TRUE(memory_limit_files("0::no-slash/at-start\n1:memory:x\n").empty())
      << "the path is not below the mount";
}

TEST(ParseMemoryLimit, RecognizesNoLimit) {
  EXPECT_EQ(parse_memory_limit("4294967296\n"), 4294967296U);
  EXPECT_EQ(parse_memory_limit("max\n"), std::nullopt);
  EXPECT_EQ(parse_memory_limit("9223372036854771712\n"), std::nullopt) << "version 1 with 4 KiB pages";
  EXPECT_EQ(parse_memory_limit("9223372036854710272\n"), std::nullopt) << "version 1 with 64 KiB pages";
  EXPECT_EQ(parse_memory_limit(""), std::nullopt);
}

TEST(FreeInGroup, CountsCacheThatCanBeDroppedAsFree) {
  constexpr std::string_view kStat = "anon 5\ninactive_file 300\nactive_file 10\n";
  EXPECT_EQ(free_in_group("1000\n", "700\n", kStat), 600U);
  EXPECT_EQ(free_in_group("1000\n", "700\n", "inactive_file 20\ntotal_inactive_file 100\n"), 400U);
  EXPECT_EQ(free_in_group("1000\n", "700\n", "total_inactive_file 100\ninactive_file 20\n"), 400U);
  EXPECT_EQ(free_in_group("1000\n", "2000\n", ""), 0U) << "above a limit that was lowered";
  EXPECT_EQ(free_in_group("1000\n", "100\n", "inactive_file 5000\n"), 1000U);
  EXPECT_EQ(free_in_group("max\n", "700\n", kStat), std::nullopt);
  EXPECT_EQ(free_in_group("1000\n", "", "nonsense"), 1000U);
}

TEST(FreeMemory, IsWithinWhatMayBeUsed) {
  EXPECT_GT(free_memory_bytes(), 0U);
  EXPECT_LE(free_memory_bytes(), usable_memory_bytes());
  const Environment environment = read_environment();
  if (environment.memory_limit_bytes) {
    EXPECT_LE(usable_memory_bytes(), *environment.memory_limit_bytes);
  }
}

TEST(ContainerKind, IsRecognizedByItsMarks) {
  constexpr std::string_view kOnDisk = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n";
  constexpr std::string_view kOnOverlay = "22 1 0:50 / / rw - overlay overlay rw\n";
  const TempDirectory root;
  EXPECT_EQ(container_kind(root.path(), kOnDisk), "");
  EXPECT_EQ(container_kind(root.path(), kOnOverlay), "unknown kind");
  std::ofstream(root.file(".dockerenv")) << "";
  EXPECT_EQ(container_kind(root.path(), kOnOverlay), "docker");
  std::filesystem::create_directories(root.file("run"));
  std::ofstream(root.file("run/.containerenv")) << "";
  EXPECT_EQ(container_kind(root.path(), kOnOverlay), "podman");
  std::filesystem::create_directories(root.file("var/run/secrets/kubernetes.io"));
  EXPECT_EQ(container_kind(root.path(), kOnDisk), "kubernetes");
}

TEST(ReadEnvironment, OfThisMachineIsPlausible) {
  const Environment environment = read_environment();
  EXPECT_FALSE(environment.kernel.empty());
  EXPECT_FALSE(environment.cpu.empty());
  EXPECT_GE(environment.cores, 1U);
  EXPECT_GT(environment.memory_bytes, environment.memory_available_bytes);
  EXPECT_GT(environment.memory_available_bytes, 0U);
  if (environment.memlock_soft_bytes && environment.memlock_hard_bytes) {
    EXPECT_LE(*environment.memlock_soft_bytes, *environment.memlock_hard_bytes);
  }
}

}  // namespace
}  // namespace trunkline::os
