#include "trunkline/volume.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "base/creation_error.h"
#include "base/log.h"
#include "io/file/open_members.h"
#include "os/file_pair.h"
#include "volume/descriptor.h"
#include "volume/overlap.h"
#include "volume/stripe_files.h"

namespace trunkline {
namespace {

using volume::check_no_overlap;
using volume::StripeFiles;

std::unexpected<Error> bad_argument(std::string message, std::string_view path = {}) {
  return std::unexpected(make_error(ErrorKind::invalid_argument, std::move(message), path));
}

// Two spellings of one directory (a symbolic link, "a/../a") would silently put two members on one disk.
Status check_directories(const std::vector<std::string>& directories) {
  if (directories.empty() || directories.size() > volume::kMaxMembers) {
    return bad_argument(
        fmt::format("directories: must be from 1 to {1}, not {0}", directories.size(), volume::kMaxMembers));
  }
  std::map<std::pair<dev_t, ino_t>, std::string> seen;
  for (const std::string& directory : directories) {
    struct stat status{};
    const std::string action = fmt::format("open the volume directory {}", directory);
    if (::stat(directory.c_str(), &status) != 0)
      return std::unexpected(missing_directory_error(errno, action, directory));
    if (!S_ISDIR(status.st_mode)) return std::unexpected(system_error(ENOTDIR, action, directory));
    const auto [same, fresh] = seen.emplace(std::pair(status.st_dev, status.st_ino), directory);
    if (!fresh) {
      return bad_argument(fmt::format("directories: {} and {} are the same directory; name each once",
                                      same->second, directory),
                          directory);
    }
  }
  return {};
}

// The descriptors are ordinary files; an engine whose files exist only in memory has nowhere to put them.
Status check_engine(const std::optional<Engine>& engine) {
  auto engine_now = engine ? Result<Engine>(*engine) : Engine::default_engine();
  if (!engine_now) return std::unexpected(engine_now.error());
  if (!engine_now->valid()) return bad_argument("engine: is empty; create one with Engine::create");
  if (engine_now->config().backend != BackendKind::memory) return {};
  return std::unexpected(make_error(ErrorKind::unsupported,
                                    "cannot open a striped file: a volume consists of directories, but the "
                                    "memory backend keeps files in the process; use another backend"));
}

Status check_free(const StripeFiles& files, const StripeFiles::Presence& presence, Mode mode) {
  if (mode == Mode::create && presence.any()) {
    return std::unexpected(
        system_error(EEXIST, fmt::format("create striped file {}", files.name()), files.name()));
  }
  // No descriptor anywhere: these are unrelated plain files that happen to have the names of members.
  for (std::size_t i = 0; !presence.any_descriptor() && i < files.members().size(); ++i) {
    if (!presence.members[i]) continue;
    const std::string& path = files.members()[i];
    Error error = make_error(
        ErrorKind::system,
        fmt::format(
            "cannot create striped file {}: {} exists (EEXIST), and no descriptor says that it is part of "
            "a striped file; choose another name or remove it",
            files.name(), path),
        path);
    error.code = EEXIST;
    return std::unexpected(std::move(error));
  }
  return presence.any_descriptor() ? check_no_overlap(files, presence, "overwrite") : Status{};
}

Status check_direct(const StripeFiles& files, const StripeFiles::Presence& presence) {
  for (std::size_t i = 0; i < files.members().size(); ++i) {
    if (!presence.members[i]) continue;
    auto pair = os::open_pair(files.members()[i], O_RDONLY, os::DirectPolicy::always);
    if (!pair) return std::unexpected(pair.error());
  }
  return {};
}

Result<File> open_existing(const std::optional<Engine>& engine, const StripeFiles& files,
                           const OpenOptions& options) {
  const auto stripe_bytes = files.check();
  if (!stripe_bytes) return std::unexpected(stripe_bytes.error());
  const io::Layout layout{static_cast<unsigned>(files.members().size()), *stripe_bytes};
  return io::open_members(engine, files.members(), layout, options, files.name());
}

Result<File> create_members(const std::optional<Engine>& engine, const StripeFiles& files,
                            std::uint64_t stripe_bytes, const OpenOptions& options) {
  const io::Layout layout{static_cast<unsigned>(files.members().size()), stripe_bytes};
  auto file = io::open_members(engine, files.members(), layout, options, files.name());
  if (!file) return file;
  if (auto synced = files.sync_directories(); !synced) return std::unexpected(synced.error());
  return file;
}

// Creates, or empties, a striped file. A crash at any time leaves the old file emptied, the new file, or a
// file that is reported as `corrupt` when opened; never old contents under a new layout.
Result<File> open_new(const std::optional<Engine>& engine, const StripeFiles& files,
                      std::uint64_t stripe_bytes, const OpenOptions& options) {
  const auto presence = files.survey();
  if (!presence) return std::unexpected(presence.error());
  if (auto available = check_free(files, *presence, options.mode); !available)
    return std::unexpected(available.error());
  // 0. Reject what would fail below while the old contents still exist.
  if (options.direct == Direct::always) {
    if (auto possible = check_direct(files, *presence); !possible) return std::unexpected(possible.error());
  }
  // 1. Remove old contents, durably.
  if (auto emptied = files.empty_members(*presence); !emptied) return std::unexpected(emptied.error());
  // 2. Write descriptors, durably: until all have the new id the file is corrupt. When two create a new file
  // at once, one of them fails here.
  const auto if_present = presence->any() ? os::IfPresent::replace : os::IfPresent::fail;
  if (auto written = files.write_descriptors(stripe_bytes, if_present); !written)
    return std::unexpected(written.error());
  // 3. Create the members, and make their names durable, so that what a later sync() writes is found after a
  // power failure.
  auto file = create_members(engine, files, stripe_bytes, options);
  // A new file that could not be created leaves no trace, but a member that someone else created meanwhile
  // must not be removed.
  if (!file && !presence->any() && file.error().code != EEXIST) {
    if (auto removed = files.remove(); !removed)
      file.error().message +=
          fmt::format("; its partly created files could not be removed ({})", removed.error().message);
  }
  return file;
}

Result<File> open_striped(const std::optional<Engine>& engine, const std::vector<std::string>& directories,
                          const std::string& name, std::uint64_t stripe_bytes, const OpenOptions& options) {
  if (auto valid = StripeFiles::check_name(name); !valid) return std::unexpected(valid.error());
  if (auto usable = check_engine(engine); !usable) return std::unexpected(usable.error());
  const StripeFiles files(directories, name);
  log::debug(log::Component::volume, "opening striped file {} in {} directories", files.name(),
             directories.size());
  switch (options.mode) {
    case Mode::read:
    case Mode::read_write:
      return open_existing(engine, files, options);
    case Mode::write:
    case Mode::create:
      return open_new(engine, files, stripe_bytes, options);
  }
  return bad_argument("mode: is not a Mode");
}

}  // namespace

Result<Volume> Volume::create(std::vector<std::string> directories, const VolumeOptions& options) {
  if (!volume::is_stripe_size(options.stripe_bytes)) {
    return bad_argument(fmt::format("stripe_bytes: must be a multiple of {1} and at most {2}, not {0}",
                                    options.stripe_bytes, volume::kMinStripeBytes, volume::kMaxStripeBytes));
  }
  if (auto valid = check_directories(directories); !valid) return std::unexpected(valid.error());
  // Files are opened later, perhaps after a change of the working directory.
  for (std::string& directory : directories) {
    std::error_code failed;
    auto absolute = std::filesystem::absolute(directory, failed);
    if (failed) {
      return std::unexpected(system_error(failed.value(), "find the working directory", directory));
    }
    directory = std::move(absolute).string();
  }
  return Volume(std::move(directories), options);
}

Result<File> Volume::open(const Engine& engine, const std::string& name, const OpenOptions& options) const {
  return open_striped(engine, directories_, name, options_.stripe_bytes, options);
}

Result<File> Volume::open(const std::string& name, const OpenOptions& options) const {
  return open_striped(std::nullopt, directories_, name, options_.stripe_bytes, options);
}

Status Volume::remove(const std::string& name) const {
  if (auto valid = StripeFiles::check_name(name); !valid) return valid;
  const StripeFiles files(directories_, name);
  const auto presence = files.survey();
  if (!presence) return std::unexpected(presence.error());
  // Without any descriptor, files with the names of members are unrelated plain files.
  if (!presence->any_descriptor())
    return std::unexpected(system_error(ENOENT, "remove striped file " + files.name(), files.name()));
  if (auto whole = check_no_overlap(files, *presence, "remove"); !whole) return whole;
  return files.remove();
}

Result<std::vector<std::string>> Volume::list() const {
  constexpr std::string_view kSuffix = ".stripe";
  std::set<std::string> names;
  for (const std::string& directory : directories_) {
    std::error_code error;
    std::filesystem::directory_iterator entry(directory, error);
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
      const std::string file = entry->path().filename().string();
      if (!file.ends_with(kSuffix)) continue;
      std::string name = file.substr(0, file.size() - kSuffix.size());
      if (StripeFiles::check_name(name)) names.insert(std::move(name));
    }
    if (error)
      return std::unexpected(
          system_error(error.value(), "list the volume directory " + directory, directory));
  }
  return std::vector(names.begin(), names.end());
}

}  // namespace trunkline
