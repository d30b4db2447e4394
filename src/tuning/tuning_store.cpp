#include "tuning/tuning_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>
#include <thread>

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
// Changing the file takes milliseconds. A holder that was stopped, or a file server that lost the lock, must
// not stop others for ever.
constexpr std::chrono::seconds kLockTimeout{3};
constexpr std::chrono::milliseconds kLockInterval{20};

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
    if (!fd.valid()) return std::unexpected(system_error(errno, "open the lock file " + path, path));
    StoreLock lock(std::move(fd));
    const auto deadline = std::chrono::steady_clock::now() + kLockTimeout;
    while (!lock.try_lock()) {
      if (std::chrono::steady_clock::now() >= deadline) {
        return std::unexpected(
            Error{.kind = ErrorKind::system,
                  .code = EBUSY,
                  .message = fmt::format("cannot lock {}: another process is changing the saved settings "
                                         "(EBUSY); try again when it has ended",
                                         path),
                  .path = path});
      }
      std::this_thread::sleep_for(kLockInterval);
    }
    return lock;
  }

 private:
  explicit StoreLock(os::UniqueFd fd) : fd_(std::move(fd)) {}

  // False while somebody else holds it. Where the filesystem does not support locks, nothing is held.
  bool try_lock() {
    lock_ =
        std::make_unique<os::FileLock>(fd_.get(), os::FileLock::Kind::exclusive, os::FileLock::Wait::never);
    return !lock_->busy();
  }

  os::UniqueFd fd_;
  std::unique_ptr<os::FileLock> lock_;  // ends before the descriptor
};

Status make_directory(const std::string& file) {
  std::error_code code;
  const std::string directory = os::directory_of(file);
  std::filesystem::create_directories(directory, code);
  if (!code) return {};
  return std::unexpected(
      system_error(code.value(), fmt::format("create {} for saved settings", directory), directory));
}

// TRUNKLINE_TUNING may name anything, such as /dev/null.
Status check_is_file(const std::string& file) {
  struct stat status{};
  if (::lstat(file.c_str(), &status) != 0 || S_ISREG(status.st_mode) || S_ISLNK(status.st_mode)) return {};
  return std::unexpected(make_error(
      ErrorKind::invalid_argument,
      fmt::format(
          "{} is not a regular file, so settings cannot be saved there; set TRUNKLINE_TUNING to another "
          "path, or to off to use none",
          file),
      file));
}

// Under FILE.damaged, FILE.damaged-2 and so on: it may be of another program, and is not removed.
Result<std::string> set_aside(const std::string& file) {
  for (unsigned number = 1;; ++number) {
    std::string aside = number == 1 ? file + ".damaged" : fmt::format("{}.damaged-{}", file, number);
    if (::renameat2(AT_FDCWD, file.c_str(), AT_FDCWD, aside.c_str(), RENAME_NOREPLACE) == 0) return aside;
    if (os::may_lack_rename_flags(errno) && ::link(file.c_str(), aside.c_str()) == 0 &&
        ::unlink(file.c_str()) == 0)
      return aside;
    if (errno != EEXIST) return std::unexpected(system_error(errno, "rename " + file, file));
  }
}

bool is_damaged(const Error& error) { return error.kind == ErrorKind::format; }

// A file that cannot be read as saved settings is renamed, unless TRUNKLINE_TUNING names it: it may be a file
// of another program, named by mistake.
Status check_may_rename(const std::string& file) {
  if (variable(kVariable) != file) return {};
  return std::unexpected(make_error(
      ErrorKind::invalid_argument,
      fmt::format("TRUNKLINE_TUNING names {}, which does not hold settings that trunkline tune saved; "
                  "set it to another path, or remove the file",
                  file),
      file));
}

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
  if (auto is_file = check_is_file(file); !is_file) return is_file;
  if (auto made = make_directory(file); !made) return made;
  if (auto lock = StoreLock::acquire(file); !lock) return std::unexpected(lock.error());
  const auto loaded = load(file);
  if (loaded) return {};
  if (is_damaged(loaded.error())) return check_may_rename(file);
  return std::unexpected(loaded.error());
}

Status store(const std::string& file, const Tuning& tuning) {
  if (auto is_file = check_is_file(file); !is_file) return is_file;
  if (auto made = make_directory(file); !made) return made;
  const auto lock = StoreLock::acquire(file);
  if (!lock) return std::unexpected(lock.error());
  auto loaded = load(file);
  if (!loaded && !is_damaged(loaded.error())) return std::unexpected(loaded.error());
  if (!loaded) {
    if (auto may = check_may_rename(file); !may) return may;
    const auto aside = set_aside(file);
    if (!aside) return std::unexpected(aside.error());
    log::warn(log::Component::engine, "{}; it was renamed to {}", loaded.error().message, *aside);
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
  if (auto is_file = check_is_file(file); !is_file) return std::unexpected(is_file.error());
  std::error_code missing;
  if (!std::filesystem::exists(file, missing)) return 0;
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
  if (auto is_file = check_is_file(file); !is_file) return std::unexpected(is_file.error());
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) return false;
  const auto lock = StoreLock::acquire(file);
  if (!lock) return std::unexpected(lock.error());
  if (!load(file)) {
    if (auto may = check_may_rename(file); !may) return std::unexpected(may.error());
    const auto aside = set_aside(file);
    if (!aside) return std::unexpected(aside.error());
    log::warn(log::Component::engine, "{} did not hold saved settings that can be read; it was renamed to {}",
              file, *aside);
    return true;
  }
  if (::unlink(file.c_str()) == 0) return true;
  if (errno == ENOENT) return false;
  return std::unexpected(system_error(errno, "remove " + file, file));
}

}  // namespace trunkline::tuning
