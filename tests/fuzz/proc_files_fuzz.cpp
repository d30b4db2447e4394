// Kernel files about mounts, memory and cgroups: no content causes a crash, and results match the query.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "os/environment.h"
#include "os/mountinfo.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace trunkline::os;
  const std::string_view text(reinterpret_cast<const char*>(data), bytes);
  const auto mounts = parse_mountinfo(text);
  for (const Mount& mount : mounts) {
    if (mount.point.empty() || mount.filesystem.empty()) std::abort();
    const MountQuery by_id{.mount_id = mount.id, .device = {}, .path = "/"};
    const Mount* found = find_mount(mounts, by_id);
    if (found == nullptr || (mount.id != 0 && found->id != mount.id)) {
      if (mount.id != 0) std::abort();
    }
    const MountQuery by_path{.mount_id = 0, .device = mount.device, .path = mount.point};
    const Mount* above = find_mount(mounts, by_path);
    if (mount.point.starts_with('/') && (above == nullptr || above->device != mount.device)) std::abort();
  }
  for (const std::string& file : memory_limit_files(text)) {
    if (!file.starts_with("/sys/fs/cgroup/")) std::abort();
  }
  if (const auto limit = parse_memory_limit(text); limit && *limit >= 1ULL << 63) std::abort();
  if (const auto left = free_in_group(text, text, text); left > parse_memory_limit(text)) std::abort();
  meminfo_bytes(text, "MemTotal");
  field_of(text, "CapEff");
  chosen_setting(text);
  has_ipc_lock(text, text);
  return 0;
}
