#include "cli/doctor/advice.h"

#include <fmt/format.h>

#include <algorithm>

#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

constexpr std::uint64_t kTorchAlignment = 64;  // where torch puts CPU tensors of 1 MB and more

bool refused(const Findings& findings, std::string_view what) {
  return std::ranges::any_of(findings.paths, [&](const PathFinding& path) {
    return path.explanation && std::ranges::any_of(path.explanation->refused, [&](const Refusal& refusal) {
             return refusal.what == what;
           });
  });
}

void advise_on_io_uring(const Findings& findings, const BackendFinding& backend,
                        std::vector<std::string>& advice) {
  const os::Environment& environment = findings.environment;
  if (environment.io_uring_disabled.value_or(0) != 0) {
    advice.push_back(fmt::format(
        "io_uring is disabled by the administrator (kernel.io_uring_disabled is {}): sysctl -w "
        "kernel.io_uring_disabled=0{}",
        *environment.io_uring_disabled,
        environment.io_uring_disabled == 1 ? ", or put this user's group into kernel.io_uring_group" : ""));
  } else if (backend.why.find("ENOSYS") != std::string::npos && !environment.seccomp_filter) {
    advice.emplace_back(
        "This kernel was built without io_uring: use Linux 5.6 or newer with CONFIG_IO_URING.");
  } else if (environment.seccomp_filter) {
    advice.emplace_back(
        "io_uring is forbidden by a seccomp filter: allow io_uring_setup, io_uring_enter and "
        "io_uring_register in the "
        "container's profile (docker run --security-opt seccomp=PROFILE.json; Kubernetes: "
        "securityContext.seccompProfile)");
  } else {
    advice.push_back("io_uring is not available; libaio or threads are used instead: " + backend.why);
  }
}

void advise_on_backends(const Findings& findings, std::vector<std::string>& advice) {
  for (const BackendFinding& backend : findings.backends) {
    if (backend.works) continue;
    if (backend.kind == BackendKind::io_uring) {
      advise_on_io_uring(findings, backend, advice);
    } else if (backend.kind == BackendKind::libaio && backend.why.find("EAGAIN") != std::string::npos) {
      advice.emplace_back("libaio found no free slots: sysctl -w fs.aio-max-nr=1048576");
    } else if (!findings.config) {
      advice.push_back(fmt::format("{} was refused: {}", to_string(backend.kind), backend.why));
    }
  }
}

void advise_on_memory(const Findings& findings, std::vector<std::string>& advice) {
  const os::Environment& environment = findings.environment;
  if (refused(findings, "memory lock") || refused(findings, "registered buffers")) {
    advice.push_back(
        fmt::format("Buffers could not be locked or registered{}: raise the limit with ulimit -l unlimited "
                    "(a line \"* - memlock "
                    "unlimited\" in /etc/security/limits.d, docker run --ulimit memlock=-1, systemd "
                    "LimitMEMLOCK=infinity)",
                    environment.memlock_soft_bytes
                        ? fmt::format(" (memlock limit {})", format_size(*environment.memlock_soft_bytes))
                        : ""));
  }
  if (environment.huge_pages == "never") {
    advice.emplace_back(
        "Huge pages are off, so each transfer needs many small segments: echo madvise > "
        "/sys/kernel/mm/transparent_hugepage/enabled");
  }
}

void advise_on_gpus(const CudaFinding& cuda, std::vector<std::string>& advice) {
  for (const auto& [info, link] : cuda.gpus) {
    if (link.width == 0 || link.width >= link.most_width) continue;
    advice.push_back(
        fmt::format("cuda:{} is connected by {} PCIe lanes of {}: move it to a slot that has all of them, or "
                    "check riser and BIOS settings",
                    info.ordinal, link.width, link.most_width));
  }
}

// Advises on what lies between a path's disk and the GPUs.
void advise_on_way_to_gpus(const PathFinding& path, const CudaFinding& cuda,
                           std::vector<std::string>& advice) {
  if (cuda.gpus.empty() || !path.explanation || !path.explanation->direct) return;
  const std::string& device = path.explanation->device;
  for (const auto& [info, link] : cuda.gpus) {
    if (!path.numa_node || !link.numa_node || *path.numa_node == *link.numa_node) continue;
    advice.push_back(
        fmt::format("{} is on a disk of NUMA node {}, cuda:{} is on node {}: their bytes cross the "
                    "processors' link; use a disk "
                    "of node {} for this GPU",
                    path.path, *path.numa_node, info.ordinal, *link.numa_node, *link.numa_node));
  }
  if (device.starts_with("/dev/nvme") && !cuda.nvidia_fs && cuda.why.empty()) {
    advice.push_back(
        fmt::format("{} is on an NVMe disk that GPUs could read themselves: install GPUDirect Storage "
                    "(nvidia-gds) and load "
                    "nvidia-fs; without it their bytes are copied through pinned memory",
                    path.path));
  } else if (path.explanation->gpu == "bounce" && cuda.why_not_gds.empty()) {
    advice.push_back(fmt::format(
        "{}: GPUDirect Storage is installed but not used: {}; gdscheck -p shows its configuration", path.path,
        path.explanation->gpu_why));
  }
}

void advise_on_path(const PathFinding& path, std::vector<std::string>& advice) {
  if (path.error) {
    advice.push_back(fmt::format("{} cannot be used: {}", path.path, path.error->message));
    return;
  }
  if (!path.explanation) return;
  const Explanation& explanation = *path.explanation;
  if (path.location && path.location->in_memory) {
    advice.push_back(fmt::format(
        "{} is {}, which is in memory; name a directory on an NVMe disk to measure or to keep anything",
        path.path, explanation.filesystem));
  } else if (path.location && path.location->network) {
    advice.push_back(fmt::format(
        "{} is on a network filesystem ({}), where the page cache is faster than direct I/O; keep "
        "what must be fast on a local disk",
        path.path, explanation.filesystem));
  } else if (!explanation.direct) {
    advice.push_back(
        fmt::format("{} is read and written through the page cache ({}); ext4 and xfs support direct I/O",
                    path.path, explanation.why));
  } else if (explanation.memory_alignment > kTorchAlignment) {
    advice.push_back(fmt::format(
        "{} requires memory aligned to {} bytes: ordinary torch and numpy memory costs a copy here; "
        "trunkline.pinned_empty and trunkline.torch.empty_pinned avoid it",
        path.path, explanation.memory_alignment));
  }
}

}  // namespace

std::vector<std::string> advise(const Findings& findings) {
  std::vector<std::string> advice;
  if (!findings.has_proc) {
    advice.emplace_back(
        "/proc is not mounted, so this report lacks memory, limits and filesystems, and no path can be "
        "examined: "
        "mount -t proc proc /proc (in a chroot or container, mount it there)");
  }
  if (!findings.has_sys) {
    advice.emplace_back(
        "/sys is not mounted, so this report lacks disks, NUMA nodes and huge pages: mount -t sysfs sysfs "
        "/sys (in a "
        "chroot or container, mount it there)");
  }
  advise_on_backends(findings, advice);
  advise_on_memory(findings, advice);
  advise_on_gpus(findings.cuda, advice);
  for (const PathFinding& path : findings.paths) {
    advise_on_path(path, advice);
    advise_on_way_to_gpus(path, findings.cuda, advice);
  }
  return advice;
}

}  // namespace trunkline::cli
