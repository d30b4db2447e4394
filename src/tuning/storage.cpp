#include "tuning/storage.h"

#include <fmt/format.h>
#include <sys/vfs.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>

#include "os/durable.h"
#include "os/topology.h"

namespace trunkline::tuning {

Result<Storage> storage_of(const std::string& path) {
  auto location = os::locate(path);
  if (!location) return std::unexpected(location.error());
  struct statfs status{};
  int code = ::statfs(path.c_str(), &status) == 0 ? 0 : errno;
  if (code == ENOENT) code = ::statfs(os::directory_of(path).c_str(), &status) == 0 ? 0 : errno;
  if (code != 0)
    return std::unexpected(system_error(code, fmt::format("identify the filesystem of {}", path), path));
  static_assert(sizeof(status.f_fsid) == sizeof(std::uint64_t));
  return Storage{.filesystem = std::move(location->filesystem),
                 .device = std::move(location->device),
                 .id = fmt::format("{:016x}", std::bit_cast<std::uint64_t>(status.f_fsid))};
}

Result<std::vector<Storage>> storages_of(std::span<const std::string> paths) {
  std::vector<Storage> storages;
  for (const std::string& path : paths) {
    auto storage = storage_of(path);
    if (!storage) return std::unexpected(storage.error());
    storages.push_back(std::move(*storage));
  }
  std::ranges::sort(storages);
  const auto rest = std::ranges::unique(storages);
  storages.erase(rest.begin(), rest.end());
  return storages;
}

}  // namespace trunkline::tuning
