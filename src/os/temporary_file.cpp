#include "os/temporary_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "os/listing_pace.h"
#include "os/local_filesystem.h"
#include "os/same_file.h"

namespace trunkline::os {
namespace {

constexpr std::string_view kPrefix = ".trunkline-";
constexpr std::string_view kSuffix = ".tmp";
constexpr std::size_t kDigits = 16;

bool has_no_name(int fd) {
  struct stat status{};
  return ::fstat(fd, &status) == 0 && status.st_nlink == 0;
}

}  // namespace

std::string temporary_name(const std::string& directory) {
  std::random_device random;
  return fmt::format("{}/{}{:08x}{:08x}{}", directory, kPrefix, random(), random(), kSuffix);
}

bool is_temporary_name(std::string_view name) {
  if (name.size() != kPrefix.size() + kDigits + kSuffix.size()) return false;
  return name.starts_with(kPrefix) && name.ends_with(kSuffix) &&
         name.substr(kPrefix.size(), kDigits).find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

WriterClaim::WriterClaim(int fd)
    : lock_(fd, FileLock::Kind::exclusive, FileLock::Wait::never),
      lost_(lock_.busy() || (lock_.held() && has_no_name(fd))) {}

DeadWriter::DeadWriter(UniqueFd fd)
    : fd_(std::move(fd)), lock_(fd_.get(), FileLock::Kind::exclusive, FileLock::Wait::never) {}

std::unique_ptr<DeadWriter> DeadWriter::find(const std::string& path) { return find(AT_FDCWD, path.c_str()); }

std::unique_ptr<DeadWriter> DeadWriter::find(int directory, const char* name) {
  struct stat named{};
  // fstatat first: opening anything but a regular file may have side effects.
  if (::fstatat(directory, name, &named, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(named.st_mode)) return nullptr;
  UniqueFd fd(::openat(directory, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  // Other filesystems may be mounted on several machines, with locks that hold only within each: acquiring a
  // lock proves nothing there.
  if (!fd.valid() || !is_on_local_filesystem(fd.get())) return nullptr;
  std::unique_ptr<DeadWriter> dead(new DeadWriter(std::move(fd)));
  if (!dead->lock_.held()) return nullptr;
  // The writer may have renamed the file before this lock was acquired: then the name is gone, or belongs to
  // another file.
  struct stat opened{};
  if (::fstat(dead->fd_.get(), &opened) != 0 || !S_ISREG(opened.st_mode)) return nullptr;
  if (::fstatat(directory, name, &named, AT_SYMLINK_NOFOLLOW) != 0 || !is_same_file(named, opened))
    return nullptr;
  return dead;
}

namespace {

// Returns how many names there are.
std::size_t remove_dead_files(const UniqueFd& opened, const std::string& directory) {
  std::size_t names = 0;
  std::error_code code;
  // Names are looked up in the directory that was opened, wherever its path leads by now.
  std::filesystem::directory_iterator entry(directory, code);
  for (; !code && entry != std::filesystem::directory_iterator(); entry.increment(code)) {
    ++names;
    const std::string name = entry->path().filename().string();
    if (!is_temporary_name(name)) continue;
    if (const auto dead = DeadWriter::find(opened.get(), name.c_str()))
      ::unlinkat(opened.get(), name.c_str(), 0);
  }
  return names;
}

UniqueFd open_directory(const std::string& directory) {
  return UniqueFd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

ListingPace::Nanoseconds now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

}  // namespace

void remove_dead_temporary_files(const std::string& directory) {
  if (const UniqueFd opened = open_directory(directory); opened.valid()) remove_dead_files(opened, directory);
}

void remove_dead_temporary_files_sometimes(const std::string& directory) {
  static ListingPace pace;
  const UniqueFd opened = open_directory(directory);
  struct stat status{};
  if (!opened.valid() || ::fstat(opened.get(), &status) != 0) return;
  const auto began = now();
  if (!pace.is_due(status, began)) return;
  const std::size_t names = remove_dead_files(opened, directory);
  pace.listed(status, names, began, now());
}

}  // namespace trunkline::os
