#include "records/file_stamp.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "io/file/file_core.h"

namespace trunkline::records {

Result<FileStamp> stamp_of(const File& file) {
  const auto bytes = file.size();
  if (!bytes) return std::unexpected(bytes.error());
  FileStamp stamp{.bytes = *bytes};
  const auto& members = file.core()->members;
  if (file.core()->engine()->config().backend == BackendKind::memory) return stamp;
  for (const io::Member& member : members) {
    struct stat status{};
    if (::fstat(member.pair.buffered.get(), &status) != 0)
      return std::unexpected(system_error(errno, fmt::format("stat {}", member.path), member.path));
    stamp.mtime_ns = std::max(stamp.mtime_ns,
                              std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec);
    stamp.inode += status.st_ino;
    // The size that the file has kept is that of when it was opened.
    if (members.size() == 1 && S_ISREG(status.st_mode))
      stamp.bytes = static_cast<std::uint64_t>(status.st_size);
  }
  return stamp;
}

}  // namespace trunkline::records
