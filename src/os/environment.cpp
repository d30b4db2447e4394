#include "os/environment.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <system_error>

#include "os/mountinfo.h"
#include "os/read_text.h"

namespace trunkline::os {
namespace {

std::string text_of(const std::string& path) { return read_text(path).value_or(""); }

std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

// The number that `text` starts with.
template <class Integer>
std::optional<Integer> leading_number(std::string_view text, int base = 10) {
  Integer number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  return error == std::errc() ? std::optional(number) : std::nullopt;
}

std::string_view take_line(std::string_view& text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  return line;
}

std::optional<std::uint64_t> finite(rlim_t limit) {
  return limit == RLIM_INFINITY ? std::nullopt : std::optional<std::uint64_t>(limit);
}

unsigned usable_cores() {
  cpu_set_t set;
  // Fails on machines with more processors than cpu_set_t has bits; the processors online are a good
  // approximation then.
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<unsigned>(CPU_COUNT(&set));
  return static_cast<unsigned>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
}

std::optional<std::uint64_t> smallest_memory_limit() {
  std::optional<std::uint64_t> smallest;
  for (const std::string& path : memory_limit_files(text_of("/proc/self/cgroup"))) {
    const auto limit = parse_memory_limit(text_of(path));
    if (limit && (!smallest || *limit < *smallest)) smallest = limit;
  }
  return smallest;
}

// Adds FILE of `path` under `mount` and of every directory above it, up to `mount` itself.
void append_upwards(std::vector<std::string>& files, std::string_view mount, std::string_view path,
                    std::string_view file) {
  // In a container without a cgroup namespace, the path is the host's and does not exist here. The mount then
  // is the container's own cgroup, so its top is always examined.
  while (path.ends_with('/')) path.remove_suffix(1);
  for (;;) {
    files.push_back(std::string(mount).append(path).append("/").append(file));
    if (path.empty()) return;
    path = path.substr(0, path.rfind('/'));  // the path starts with one
  }
}

bool names_memory(std::string_view controllers) {
  while (!controllers.empty()) {
    const std::string_view name = controllers.substr(0, controllers.find(','));
    if (name == "memory") return true;
    controllers.remove_prefix(std::min(controllers.size(), name.size() + 1));
  }
  return false;
}

}  // namespace

std::optional<std::string> field_of(std::string_view text, std::string_view key) {
  while (!text.empty()) {
    const std::string_view line = take_line(text);
    const std::size_t colon = line.find(':');
    if (colon != std::string_view::npos && trim(line.substr(0, colon)) == key)
      return std::string(trim(line.substr(colon + 1)));
  }
  return std::nullopt;
}

std::optional<std::uint64_t> meminfo_bytes(std::string_view meminfo, std::string_view key) {
  const auto value = field_of(meminfo, key);
  if (!value || !value->ends_with(" kB")) return std::nullopt;
  const auto kibibytes = leading_number<std::uint64_t>(*value);
  if (!kibibytes) return std::nullopt;
  return *kibibytes * 1024;  // the kernel's kB
}

std::string chosen_setting(std::string_view text) {
  const std::size_t open = text.find('[');
  if (open == std::string_view::npos) return {};
  const std::size_t close = text.find(']', open);
  if (close == std::string_view::npos) return {};
  return std::string(text.substr(open + 1, close - open - 1));
}

bool has_ipc_lock(std::string_view proc_self_status, std::string_view proc_self_uid_map) {
  constexpr unsigned kCapIpcLock = 14;  // linux/capability.h
  const auto effective = leading_number<std::uint64_t>(field_of(proc_self_status, "CapEff").value_or(""), 16);
  if (!effective || (*effective >> kCapIpcLock & 1) == 0) return false;
  // The initial namespace maps all of 0 .. 2^32 - 2 to itself (user_namespaces(7)).
  std::vector<std::string> numbers;
  for (std::string_view rest = trim(proc_self_uid_map); !rest.empty(); rest = trim(rest)) {
    const std::size_t end = std::min(rest.find_first_of(" \t\n"), rest.size());
    numbers.emplace_back(rest.substr(0, end));
    rest.remove_prefix(end);
  }
  return numbers == std::vector<std::string>{"0", "0", "4294967295"};
}

std::vector<std::string> memory_limit_files(std::string_view proc_self_cgroup) {
  std::vector<std::string> files;
  while (!proc_self_cgroup.empty()) {
    std::string_view line = take_line(proc_self_cgroup);  // "ID:CONTROLLERS:PATH", cgroups(7)
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const std::string_view path = line.substr(second + 1);
    if (!path.starts_with('/')) continue;  // otherwise it would escape the directory that it is appended to
    if (controllers.empty()) append_upwards(files, "/sys/fs/cgroup", path, "memory.max");
    if (names_memory(controllers))
      append_upwards(files, "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes");
  }
  return files;
}

std::optional<std::uint64_t> parse_memory_limit(std::string_view text) {
  // Version 1 counts pages in a signed long: "no limit" is its largest value, rounded down to a page of any
  // size.
  constexpr std::uint64_t kUnlimited = (1ULL << 63) - (1ULL << 20);
  const auto limit = leading_number<std::uint64_t>(trim(text));
  return limit && *limit < kUnlimited ? limit : std::nullopt;
}

std::optional<std::uint64_t> free_in_group(std::string_view limit, std::string_view usage,
                                           std::string_view stat) {
  const auto most = parse_memory_limit(limit);
  if (!most) return std::nullopt;
  const std::uint64_t used = leading_number<std::uint64_t>(trim(usage)).value_or(0);
  std::uint64_t cached = 0;
  while (!stat.empty()) {
    const std::string_view line = take_line(stat);
    const std::size_t space = line.find(' ');
    if (space == std::string_view::npos) continue;
    const std::string_view key = line.substr(0, space);
    // Version 1 counts those of the groups below apart.
    if (key == "total_inactive_file" || (key == "inactive_file" && cached == 0))
      cached = leading_number<std::uint64_t>(line.substr(space + 1)).value_or(0);
  }
  const std::uint64_t taken = used - std::min(used, cached);
  return *most - std::min(*most, taken);
}

std::uint64_t usable_memory_bytes() {
  const auto machine = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                       static_cast<std::uint64_t>(::sysconf(_SC_PAGE_SIZE));
  return std::min(machine, smallest_memory_limit().value_or(machine));
}

std::uint64_t free_memory_bytes() {
  std::uint64_t least =
      meminfo_bytes(text_of("/proc/meminfo"), "MemAvailable").value_or(usable_memory_bytes());
  for (const std::string& limit : memory_limit_files(text_of("/proc/self/cgroup"))) {
    const std::string group = limit.substr(0, limit.rfind('/') + 1);
    const char* const usage = limit.ends_with("memory.max") ? "memory.current" : "memory.usage_in_bytes";
    const auto left = free_in_group(text_of(limit), text_of(group + usage), text_of(group + "memory.stat"));
    least = std::min(least, left.value_or(least));
  }
  return least;
}

std::string container_kind(const std::string& root, std::string_view mountinfo) {
  const auto exists = [&root](const char* path) {
    std::error_code ignored;
    return std::filesystem::exists(root + path, ignored);
  };
  if (exists("/var/run/secrets/kubernetes.io")) return "kubernetes";
  if (exists("/run/.containerenv")) return "podman";
  if (exists("/.dockerenv")) return "docker";
  for (const Mount& mount : parse_mountinfo(mountinfo)) {
    // Machines do not boot from an overlay, except live media.
    if (mount.point == "/" && mount.filesystem == "overlay") return "unknown kind";
  }
  return {};
}

Environment read_environment() {
  Environment environment;
  struct utsname names{};
  if (::uname(&names) == 0) environment.kernel = names.release;
  environment.cpu = field_of(text_of("/proc/cpuinfo"), "model name").value_or(names.machine);
  environment.cores = usable_cores();

  const std::string meminfo = text_of("/proc/meminfo");
  environment.memory_bytes = meminfo_bytes(meminfo, "MemTotal").value_or(0);
  environment.memory_available_bytes = meminfo_bytes(meminfo, "MemAvailable").value_or(0);
  environment.memory_limit_bytes = smallest_memory_limit();

  struct rlimit memlock{};
  if (::getrlimit(RLIMIT_MEMLOCK, &memlock) == 0) {
    environment.memlock_soft_bytes = finite(memlock.rlim_cur);
    environment.memlock_hard_bytes = finite(memlock.rlim_max);
  }
  const std::string status = text_of("/proc/self/status");
  environment.memlock_exempt = has_ipc_lock(status, text_of("/proc/self/uid_map"));
  environment.seccomp_filter = field_of(status, "Seccomp") == "2";  // SECCOMP_MODE_FILTER
  environment.huge_pages = chosen_setting(text_of("/sys/kernel/mm/transparent_hugepage/enabled"));
  environment.io_uring_disabled = leading_number<int>(text_of("/proc/sys/kernel/io_uring_disabled"));
  environment.container = container_kind("", text_of("/proc/self/mountinfo"));
  return environment;
}

}  // namespace trunkline::os
