#include "io/file/open_members.h"

#include <fcntl.h>

#include <utility>

#include "base/log.h"
#include "io/engine_core.h"
#include "io/file/file_core.h"
#include "io/gpu/gds_policy.h"

namespace trunkline::io {
namespace {

int flags_of(Mode mode) {
  switch (mode) {
    case Mode::read:
      return O_RDONLY;
    case Mode::read_write:
      return O_RDWR;
    case Mode::write:
      return O_RDWR | O_CREAT | O_TRUNC;
    case Mode::create:
      return O_RDWR | O_CREAT | O_EXCL;
  }
  return O_RDONLY;
}

os::DirectPolicy policy_of(const Engine& engine, Direct direct) {
  switch (direct) {
    case Direct::automatic:
      return os::DirectPolicy::automatic;
    case Direct::always:
      return os::DirectPolicy::always;
    case Direct::never:
      return os::DirectPolicy::never;
    case Direct::unless_cached:
      // GPUs that must read files directly cannot go through the page cache.
      return io::is_gds_required(engine.config().gpu) ? os::DirectPolicy::automatic
                                                      : os::DirectPolicy::unless_cached;
  }
  return os::DirectPolicy::automatic;
}

Result<os::FilePair> open_member(const Engine& engine, const std::string& path, const OpenOptions& options,
                                 mode_t permissions, os::Lookup lookup) {
  const int flags = flags_of(options.mode);
  if (engine.config().backend != BackendKind::memory)
    return os::open_pair(path, flags, policy_of(engine, options.direct), permissions, lookup);
  auto file = engine.core()->memory_files().open(path, flags);
  if (!file) return std::unexpected(file.error());
  return os::make_pair_of(std::move(*file), path, flags, policy_of(engine, options.direct));
}

}  // namespace

Result<File> open_members(const std::optional<Engine>& engine, const std::vector<std::string>& paths,
                          const Layout& layout, const OpenOptions& options, const std::string& name,
                          mode_t permissions, os::Lookup lookup) {
  auto core = std::make_shared<FileCore>(engine, name, options, layout);
  auto engine_now = core->engine();
  if (!engine_now) return std::unexpected(engine_now.error());
  if (auto usable = engine_now->core()->usable(); !usable) return std::unexpected(usable.error());
  for (const std::string& path : paths) {
    auto pair = open_member(*engine_now, path, options, permissions, lookup);
    if (!pair) return std::unexpected(pair.error());
    Member& member = core->members.emplace_back();
    member.path = path;
    member.pair = std::move(*pair);
    log::debug(log::Component::engine, "opened {}: {} I/O: {}", path,
               member.pair.limits.usable ? "direct" : "buffered", member.pair.limits.why);
  }
  if (auto adopted = core->adopt_sizes(); !adopted) return std::unexpected(adopted.error());
  return File(std::move(core));
}

}  // namespace trunkline::io
