#include "checkpoint/shard_links.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <tuple>
#include <utility>

#include "checkpoint/listing.h"
#include "checkpoint/names.h"
#include "os/file_type.h"

namespace trunkline::checkpoint {
namespace {

Status check_size(const std::string& path, std::uint64_t bytes) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0)
    return std::unexpected(system_error(errno, "link the shard " + path, path));
  if (S_ISREG(status.st_mode) && static_cast<std::uint64_t>(status.st_size) == bytes) return {};
  return std::unexpected(make_error(
      ErrorKind::corrupt,
      fmt::format("cannot link the shard {}: it is not a file of the {} bytes that its manifest says", path,
                  bytes),
      path));
}

}  // namespace

ShardLinks link_shards(const std::string& directory, std::uint64_t step, const Placement& placement,
                       const Manifest& base, std::span<const std::uint64_t> wanted, const DirectoryOps& ops) {
  ShardLinks result;
  const std::uint64_t count = placement.shards.size() + wanted.size();
  std::uint64_t index = placement.shards.size();
  for (const std::uint64_t number : wanted) {
    std::optional<ShardLink>& link = result.links.emplace_back();
    if (number >= base.shards.size()) continue;
    const Shard& shard = base.shards[number];
    const std::string& volume = base.volumes[shard.volume];
    const auto where = std::ranges::find(placement.volumes, volume);
    const std::string folder = volume_step_directory(directory, volume, step);
    if (where == placement.volumes.end() || !os::is_directory(folder)) continue;
    const std::string from = shard_path(directory, base, number);
    ShardLink made{.shard = shard, .path = {}};
    made.shard.volume = static_cast<std::uint64_t>(where - placement.volumes.begin());
    made.shard.file = shard_file(index++, count, placement.nonce);
    if (shard.commit == 0) made.shard.commit = base.commit;
    made.path = fmt::format("{}/{}", folder, made.shard.file);
    auto linked = check_size(from, shard.bytes);
    if (linked) linked = ops.link_file(from, made.path);
    if (linked) {
      // So that no purge of old files takes it from a run that goes on.
      std::ignore = ::utimensat(AT_FDCWD, made.path.c_str(), nullptr, 0);
      link = std::move(made);
    } else if (!result.problem) {
      result.problem = std::move(linked.error());
    }
  }
  return result;
}

}  // namespace trunkline::checkpoint
