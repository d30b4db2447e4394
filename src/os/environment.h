// What this machine, and the sandbox that this process runs in, allow.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trunkline::os {

struct Environment {
  std::string kernel;                        // release: "6.1.0-18-amd64"
  std::string cpu;                           // model, or the architecture where the kernel names no model
  unsigned cores = 0;                        // that this process may run on
  std::uint64_t memory_bytes = 0;            // of the machine; 0 where unknown
  std::uint64_t memory_available_bytes = 0;  // without swapping, as the kernel estimates it
  std::optional<std::uint64_t> memory_limit_bytes;  // of the cgroup and its ancestors; nullopt: none
  std::optional<std::uint64_t> memlock_soft_bytes;  // nullopt: unlimited
  std::optional<std::uint64_t> memlock_hard_bytes;
  bool memlock_exempt = false;           // CAP_IPC_LOCK: the memlock limit does not apply
  std::string huge_pages;                // "always", "madvise", "never"; empty where the kernel has none
  std::optional<int> io_uring_disabled;  // sysctl kernel.io_uring_disabled; nullopt: no such setting
  bool seccomp_filter = false;           // a system call filter is active
  std::string container;  // "docker", "podman", "kubernetes", "unknown kind"; empty: none detected
};

// What cannot be read is left at its default.
Environment read_environment();

// The memory that this process may use: the machine's, or the smallest limit of its control groups.
std::uint64_t usable_memory_bytes();

// How much of that is left, without swapping: page cache that the kernel would drop counts as free.
std::uint64_t free_memory_bytes();

// The parsers behind them, which work on the text of the files.

// Value of "KEY:   value" in /proc/cpuinfo, /proc/meminfo, /proc/self/status; nullopt when there is no such
// line.
std::optional<std::string> field_of(std::string_view text, std::string_view key);

// Bytes of a "1024 kB" of /proc/meminfo.
std::optional<std::uint64_t> meminfo_bytes(std::string_view meminfo, std::string_view key);

// The word in brackets of "always [madvise] never".
std::string chosen_setting(std::string_view text);

// Whether CAP_IPC_LOCK is effective where it counts: in the initial user namespace (the kernel checks
// capable()).
bool has_ipc_lock(std::string_view proc_self_status, std::string_view proc_self_uid_map);

// The limit files of a process's cgroup and all its ancestors, versions 1 and 2, from /proc/self/cgroup.
std::vector<std::string> memory_limit_files(std::string_view proc_self_cgroup);

// nullopt for "max", and for the number near 2^63 that version 1 uses instead.
std::optional<std::uint64_t> parse_memory_limit(std::string_view text);

// What a control group leaves of its limit, from its files memory.max, memory.current and memory.stat, or
// those of version 1; nullopt without a limit.
std::optional<std::uint64_t> free_in_group(std::string_view limit, std::string_view usage,
                                           std::string_view stat);

// `root` is prepended to the paths that are examined: empty on a real machine.
std::string container_kind(const std::string& root, std::string_view mountinfo);

}  // namespace trunkline::os
