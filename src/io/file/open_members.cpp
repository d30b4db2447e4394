#include "io/file/open_members.h"

#include <fcntl.h>

#include <utility>

#include "base/log.h"
#include "io/engine_core.h"
#include "io/file/file_core.h"
#include "io/tuned_settings.h"

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

// The tuning of a file whose members are on several devices; of one member it is known once that is open.
const tuning::Tuning* tuning_of_members(const Engine& engine, const std::vector<std::string>& paths) {
  const tuning::TuningTable* const tunings = engine.core()->tunings();
  return tunings != nullptr && paths.size() > 1 ? tunings->find(paths) : nullptr;
}

// Sets `tuning` where there is one member only.
Result<os::FilePair> open_member(const Engine& engine, const std::string& path, const OpenOptions& options,
                                 mode_t permissions, os::Lookup lookup, bool alone,
                                 const tuning::Tuning*& tuning) {
  const int flags = flags_of(options.mode);
  const EngineConfig& config = engine.config();
  const tuning::TuningTable* const tunings = engine.core()->tunings();
  if (config.backend != BackendKind::memory) {
    const auto choose = [&](int fd) {
      if (alone && tunings != nullptr) tuning = tunings->find_open(fd, path);
      return tuned_policy(config, options.direct, tuning);
    };
    return os::open_pair(path, flags, choose, permissions, lookup);
  }
  auto file = engine.core()->memory_files().open(path, flags);
  if (!file) return std::unexpected(file.error());
  return os::make_pair_of(std::move(*file), path, flags, tuned_policy(config, options.direct, nullptr));
}

}  // namespace

Result<File> open_members(const std::optional<Engine>& engine, const std::vector<std::string>& paths,
                          const Layout& layout, const OpenOptions& options, const std::string& name,
                          mode_t permissions, os::Lookup lookup) {
  auto core = std::make_shared<FileCore>(engine, name, options, layout);
  auto engine_now = core->engine();
  if (!engine_now) return std::unexpected(engine_now.error());
  if (auto usable = engine_now->core()->usable(); !usable) return std::unexpected(usable.error());
  const tuning::Tuning* tuning = tuning_of_members(*engine_now, paths);
  for (const std::string& path : paths) {
    auto pair = open_member(*engine_now, path, options, permissions, lookup, paths.size() == 1, tuning);
    if (!pair) return std::unexpected(pair.error());
    Member& member = core->members.emplace_back();
    member.path = path;
    member.pair = std::move(*pair);
    log::debug(log::Component::engine, "opened {}: {} I/O: {}", path,
               member.pair.limits.usable ? "direct" : "buffered", member.pair.limits.why);
  }
  core->tuned_block_bytes =
      tuned_block_bytes(engine_now->config(), engine_now->core()->block_was_passed(), *core, tuning);
  if (auto adopted = core->adopt_sizes(); !adopted) return std::unexpected(adopted.error());
  return File(std::move(core));
}

}  // namespace trunkline::io
