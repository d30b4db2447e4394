#include "tuning/tuning_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>

#include "base/log.h"
#include "os/durable.h"
#include "os/file_lock.h"
#include "os/machine_id.h"
#include "os/read_text.h"
#include "os/unique_fd.h"
#include "tuning/storage.h"
#include "tuning/tuning_file.h"

namespace trunkline::tuning {
namespace {

constexpr const char* kVariable = "TRUNKLINE_TUNING";
constexpr std::string_view kOff = "off";

std::string variable(const char* name) {
  const char* const value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return value != nullptr ? value : "";
}

// Held while the file is read, changed and written.
class StoreLock {
 public:
  static Result<StoreLock> acquire(const std::string& file) {
    const std::string path = file + ".lock";
    os::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!fd.valid()) return std::unexpected(system_error(errno, "opening the lock file " + path, path));
    return StoreLock(std::move(fd));
  }

 private:
  explicit StoreLock(os::UniqueFd fd)
      : fd_(std::move(fd)), lock_(std::make_unique<os::FileLock>(fd_.get(), os::FileLock::Kind::exclusive)) {}

  os::UniqueFd fd_;
  std::unique_ptr<os::FileLock> lock_;  // ends before the descriptor
};

Status make_directory(const std::string& file) {
  std::error_code code;
  const std::string directory = os::directory_of(file);
  std::filesystem::create_directories(directory, code);
  if (!code) return {};
  return std::unexpected(
      system_error(code.value(), fmt::format("creating {} for the tuning file", directory), directory));
}

bool is_damaged(const Error& error) { return error.kind == ErrorKind::format; }

bool is_same_subject(const Tuning& a, const Tuning& b) {
  return a.machine == b.machine && a.storages == b.storages;
}

}  // namespace

bool is_off() { return variable(kVariable) == kOff; }

std::optional<std::string> default_file() {
  if (std::string file = variable(kVariable); !file.empty() && file != kOff) return file;
  constexpr std::string_view kName = "trunkline/tuning.json";
  // Relative paths are to be ignored, says the specification.
  if (const std::string base = variable("XDG_CONFIG_HOME"); base.starts_with('/'))
    return fmt::format("{}/{}", base, kName);
  if (const std::string home = variable("HOME"); home.starts_with('/'))
    return fmt::format("{}/.config/{}", home, kName);
  return std::nullopt;
}

Result<std::vector<Tuning>> load(const std::string& file) {
  const auto text = os::read_text(file, kMaxFileBytes + 1);
  if (!text) {
    if (text.error().code == ENOENT || text.error().code == ENOTDIR) return std::vector<Tuning>{};
    return std::unexpected(text.error());
  }
  return parse_tunings(*text, file);
}

Status check_storable(const std::string& file) {
  if (auto made = make_directory(file); !made) return made;
  if (auto lock = StoreLock::acquire(file); !lock) return std::unexpected(lock.error());
  const auto loaded = load(file);
  if (loaded || is_damaged(loaded.error())) return {};
  return std::unexpected(loaded.error());
}

Status store(const std::string& file, const Tuning& tuning) {
  if (auto made = make_directory(file); !made) return made;
  const auto lock = StoreLock::acquire(file);
  if (!lock) return std::unexpected(lock.error());
  auto loaded = load(file);
  if (!loaded && !is_damaged(loaded.error())) return std::unexpected(loaded.error());
  if (!loaded) {
    log::warn(log::Component::engine, "{}; it is set aside as {}.damaged", loaded.error().message, file);
    if (::rename(file.c_str(), (file + ".damaged").c_str()) != 0)
      return std::unexpected(system_error(errno, "setting aside " + file, file));
    loaded = std::vector<Tuning>{};
  }
  std::erase_if(*loaded, [&](const Tuning& each) { return is_same_subject(each, tuning); });
  if (loaded->size() >= kMaxTunings) loaded->erase(loaded->begin());  // the oldest
  loaded->push_back(tuning);
  const std::string text = format_tunings(*loaded);
  if (auto readable = parse_tunings(text, file); !readable) return std::unexpected(readable.error());
  return os::write_file_durably(file, text);
}

Result<std::size_t> forget(const std::string& file, std::span<const std::string> paths) {
  if (!std::filesystem::exists(file)) return 0;
  const auto lock = StoreLock::acquire(file);
  if (!lock) return std::unexpected(lock.error());
  auto loaded = load(file);
  if (!loaded) return std::unexpected(loaded.error());
  const bool all_exist = std::ranges::all_of(paths, [](const std::string& path) {
    std::error_code ignored;
    return std::filesystem::exists(path, ignored);
  });
  const auto storages = all_exist ? storages_of(paths) : std::vector<Storage>{};
  const std::string machine = os::machine_id();
  const std::vector<std::string> named(paths.begin(), paths.end());
  const std::size_t count = std::erase_if(*loaded, [&](const Tuning& each) {
    const bool is_named = each.paths == named || (storages && each.storages == *storages);
    return is_named && each.machine == machine;
  });
  if (count == 0) return count;
  if (auto written = os::write_file_durably(file, format_tunings(*loaded)); !written)
    return std::unexpected(written.error());
  return count;
}

Result<bool> forget_all(const std::string& file) {
  if (!std::filesystem::exists(file)) return false;
  const auto lock = StoreLock::acquire(file);
  if (!lock) return std::unexpected(lock.error());
  if (::unlink(file.c_str()) == 0) return true;
  if (errno == ENOENT) return false;
  return std::unexpected(system_error(errno, "removing " + file, file));
}

}  // namespace trunkline::tuning
