#include "cli/doctor/advice.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace trunkline::cli {
namespace {

Findings healthy() {
  Findings findings;
  findings.environment.huge_pages = "madvise";
  for (const BackendKind kind : {BackendKind::io_uring, BackendKind::libaio, BackendKind::threads}) {
    findings.backends.push_back({.kind = kind, .works = true, .why = {}, .features = {}});
  }
  findings.config = EngineConfig{.backend = BackendKind::io_uring,
                                 .lanes = 1,
                                 .queue_depth = 32,
                                 .block_bytes = 1 << 20,
                                 .slot_bytes = 1 << 20,
                                 .pinned_budget_bytes = 1 << 30,
                                 .gpu = GpuPath::automatic,
                                 .features = {}};
  PathFinding path{.path = "/data",
                   .explanation = Explanation{},
                   .location = os::StorageLocation{},
                   .error = {},
                   .numa_node = {}};
  path.explanation->direct = true;
  path.explanation->memory_alignment = 4;
  path.explanation->filesystem = path.location->filesystem = "xfs";
  findings.paths.push_back(path);
  return findings;
}

bool says(const Findings& findings, std::string_view part) {
  return std::ranges::any_of(advise(findings),
                             [&](const std::string& each) { return each.find(part) != std::string::npos; });
}

void add_gpu(Findings& findings) {
  GpuFinding gpu;
  gpu.link.numa_node = 0;
  findings.cuda.gpus.push_back(gpu);
  findings.cuda.nvidia_fs = true;
  findings.paths[0].numa_node = 0;
  findings.paths[0].explanation->device = "/dev/nvme0n1";
  findings.paths[0].explanation->gpu = "gds";
}

void refuse_io_uring(Findings& findings, const std::string& why) {
  findings.backends[0].works = false;
  findings.backends[0].why = why;
}

TEST(Advice, MissingProcAndSys) {
  Findings findings = healthy();
  findings.has_proc = false;
  EXPECT_TRUE(says(findings, "/proc is not mounted"));
  EXPECT_FALSE(says(findings, "/sys is not mounted"));
  findings.has_sys = false;
  EXPECT_TRUE(says(findings, "/sys is not mounted"));
}

TEST(Advice, NothingToSayOnAHealthyMachine) {
  EXPECT_TRUE(advise(healthy()).empty());
  EXPECT_TRUE(healthy().usable());
}

TEST(Advice, NothingToSayAboutAGpuWithGpuDirectStorage) {
  Findings findings = healthy();
  add_gpu(findings);
  EXPECT_TRUE(advise(findings).empty()) << advise(findings).front();
}

TEST(Advice, ObstaclesBetweenADiskAndAGpu) {
  Findings findings = healthy();
  add_gpu(findings);
  findings.paths[0].numa_node = 1;
  EXPECT_TRUE(says(findings, "NUMA node 1, cuda:0 is on node 0"));
  findings.paths[0].explanation->gpu = "bounce";
  findings.paths[0].explanation->gpu_why = "compatibility mode";
  EXPECT_TRUE(says(findings, "is installed but not used: compatibility mode"));
  findings.cuda.nvidia_fs = false;
  findings.cuda.why_not_gds = "not loaded";
  EXPECT_TRUE(says(findings, "load nvidia-fs"));
  findings.paths[0].explanation->device = "/dev/sda1";
  EXPECT_FALSE(says(findings, "nvidia-fs"));
}

TEST(Advice, IoUringNamesWhatForbidsIt) {
  Findings findings = healthy();
  refuse_io_uring(findings, "cannot set up io_uring: operation not permitted (EPERM)");
  findings.environment.seccomp_filter = true;
  EXPECT_TRUE(says(findings, "allow io_uring_setup, io_uring_enter and io_uring_register"));
  findings.environment.io_uring_disabled = 2;
  EXPECT_TRUE(says(findings, "kernel.io_uring_disabled=0"));
  EXPECT_FALSE(says(findings, "seccomp"));
  EXPECT_FALSE(says(findings, "io_uring_group"));
  findings.environment.io_uring_disabled = 1;
  EXPECT_TRUE(says(findings, "io_uring_group"));
  findings.environment = {};
  refuse_io_uring(findings, "cannot set up io_uring: function not implemented (ENOSYS)");
  EXPECT_TRUE(says(findings, "CONFIG_IO_URING"));
  refuse_io_uring(findings, "cannot set up io_uring: cannot allocate memory (ENOMEM)");
  EXPECT_TRUE(says(findings, "ENOMEM"));
}

TEST(Advice, LibaioSlots) {
  Findings findings = healthy();
  findings.backends[1].works = false;
  findings.backends[1].why = "io_setup: EAGAIN";
  EXPECT_TRUE(says(findings, "fs.aio-max-nr"));
}

TEST(Advice, Memory) {
  Findings findings = healthy();
  findings.environment.memlock_soft_bytes = 8 << 20;
  findings.paths[0].explanation->refused.push_back({"memory lock", "ENOMEM"});
  EXPECT_TRUE(says(findings, "ulimit -l"));
  findings = healthy();
  findings.environment.huge_pages = "never";
  EXPECT_TRUE(says(findings, "transparent_hugepage"));
}

TEST(Advice, Paths) {
  Findings findings = healthy();
  findings.paths[0].explanation->memory_alignment = 512;
  EXPECT_TRUE(says(findings, "aligned to 512 bytes"));
  findings.paths[0].explanation->direct = false;
  findings.paths[0].explanation->why = "EINVAL";
  EXPECT_TRUE(says(findings, "through the page cache (EINVAL)"));
  findings.paths[0].location->network = true;
  EXPECT_TRUE(says(findings, "network filesystem"));
  findings.paths[0].location->network = false;
  findings.paths[0].location->in_memory = true;
  EXPECT_TRUE(says(findings, "which is in memory"));
  findings.paths[0].error = make_error(ErrorKind::system, "EACCES");
  findings.paths[0].explanation.reset();
  EXPECT_TRUE(says(findings, "/data cannot be used: EACCES"));
  EXPECT_FALSE(findings.usable());
}

TEST(Advice, NoBackendIsNotUsable) {
  Findings findings = healthy();
  for (BackendFinding& backend : findings.backends)
    backend = {.kind = backend.kind, .works = false, .why = "EPERM", .features = {}};
  findings.config.reset();
  EXPECT_TRUE(says(findings, "threads was refused: EPERM"));
  EXPECT_FALSE(findings.usable());
}

TEST(Advice, AGpuWithHalfOfItsPcieLanesIsNamed) {
  Findings findings = healthy();
  GpuFinding& gpu = findings.cuda.gpus.emplace_back();
  gpu.info.ordinal = 1;
  gpu.link.width = gpu.link.most_width = 16;
  EXPECT_TRUE(advise(findings).empty());
  gpu.link.width = 8;
  EXPECT_TRUE(says(findings, "cuda:1 is connected by 8 PCIe lanes of 16"));
}

}  // namespace
}  // namespace trunkline::cli
