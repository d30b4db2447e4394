#include "cli/bench/bench_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <random>

#include "os/unique_fd.h"

namespace trunkline::cli {
namespace {

std::unexpected<Error> wrong(std::string message, std::string_view path) {
  return std::unexpected(make_error(ErrorKind::invalid_argument, std::move(message), path));
}

std::unexpected<Error> failed(std::string_view what, const std::string& path) {
  return std::unexpected(system_error(errno, fmt::format("{} {}", what, path), path));
}

// After stat() of a path that was passed failed.
std::unexpected<Error> unusable(const std::string& path) {
  if (errno != ENOENT) return failed("stat", path);
  Error error = make_error(
      ErrorKind::system,
      fmt::format("cannot measure {}: no such file or directory (ENOENT); create the directory first, or "
                  "name an existing directory or file",
                  path),
      path);
  error.code = ENOENT;
  return std::unexpected(std::move(error));
}

std::string name_of_own_file(const std::string& directory, const std::string& run, unsigned index) {
  const char* const slash = directory.ends_with('/') ? "" : "/";
  return fmt::format("{}{}trunkline-bench-{}-{}.dat", directory, slash, run, index);
}

Result<BenchFile> existing_file(const BenchOptions& options, const std::string& path, std::uint64_t bytes) {
  if (options.writes()) {
    return wrong(
        fmt::format("{}: {} is an existing file, which bench only reads; give a directory to write in",
                    options.mix ? "--mix" : "--write", path),
        path);
  }
  if (bytes == 0) return wrong(fmt::format("{} is empty: nothing to read", path), path);
  if (options.size_bytes && *options.size_bytes > bytes) {
    return wrong(fmt::format("--size {}: {} has only {} bytes", *options.size_bytes, path, bytes), path);
  }
  return BenchFile{.path = path, .bytes = options.size_bytes.value_or(bytes), .complete = true};
}

}  // namespace

Result<BenchFiles> BenchFiles::find(const BenchOptions& options) {
  BenchFiles found;
  const std::string run = fmt::format("{}-{:08x}", ::getpid(), std::random_device{}());
  // Whole blocks, so that the last one is like any other for us and the peers.
  const std::uint64_t wanted = options.size_bytes.value_or(kGB);
  const std::uint64_t own_bytes =
      (wanted + options.block_bytes - 1) / options.block_bytes * options.block_bytes;
  unsigned index = 0;
  for (std::size_t target = 0; target < options.paths.size(); ++target) {
    const std::string& path = options.paths[target];
    struct stat status{};
    if (::stat(path.c_str(), &status) != 0) return unusable(path);
    if (S_ISDIR(status.st_mode)) {
      for (unsigned file = 0; file < options.files; ++file) {
        found.files_.push_back({.path = name_of_own_file(path, run, index++),
                                .target = target,
                                .bytes = own_bytes,
                                .own = true});
      }
    } else if (S_ISREG(status.st_mode)) {
      auto file = existing_file(options, path, static_cast<std::uint64_t>(status.st_size));
      if (!file) return std::unexpected(file.error());
      file->target = target;
      found.files_.push_back(std::move(*file));
      found.existing_ = true;
    } else {
      return wrong(fmt::format("{} is neither a directory nor a regular file", path), path);
    }
  }
  const bool has_own = std::ranges::any_of(found.files_, &BenchFile::own);
  for (const BenchFile& file : found.files_) {
    if (file.own || !has_own) continue;
    return wrong(fmt::format("{} is a file, and other paths are directories: name either directories, in "
                             "which bench makes files, or existing files, which it only reads",
                             file.path),
                 file.path);
  }
  return found;
}

BenchFiles::~BenchFiles() {
  if (keep_) return;
  for (const BenchFile& file : files_) {
    if (file.own) ::unlink(file.path.c_str());
  }
}

std::uint64_t BenchFiles::total_bytes() const {
  std::uint64_t total = 0;
  for (const BenchFile& file : files_) total += file.bytes;
  return total;
}

Status BenchFiles::check_space() const {
  struct Need {
    std::uint64_t bytes = 0;
    std::uint64_t free_bytes = 0;
    std::string directory;
  };
  std::map<dev_t, Need> needs;
  for (const BenchFile& file : files_) {
    if (!file.own) continue;
    const std::string directory = file.path.substr(0, file.path.rfind('/') + 1);
    struct stat status{};
    struct statvfs space{};
    if (::stat(directory.c_str(), &status) != 0 || ::statvfs(directory.c_str(), &space) != 0) {
      return failed("determine the free space in the directory of", file.path);
    }
    Need& need = needs[status.st_dev];
    need.bytes += file.bytes;
    need.free_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
    need.directory = directory;
  }
  for (const auto& [device, need] : needs) {
    if (need.bytes <= need.free_bytes) continue;
    Error error = make_error(
        ErrorKind::system,
        fmt::format("cannot write {} of files in {}: {} are free, {} are missing; choose a smaller --size or "
                    "--files, or another directory",
                    format_bytes(need.bytes), need.directory, format_bytes(need.free_bytes),
                    format_bytes(need.bytes - need.free_bytes)),
        need.directory);
    error.code = ENOSPC;
    return std::unexpected(std::move(error));
  }
  return {};
}

Status BenchFiles::create_empty(BenchFile& file) {
  const os::UniqueFd fd(::open(file.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd.valid()) return failed("create", file.path);
  return {};
}

Status BenchFiles::remove(BenchFile& file) {
  if (!file.own)
    return wrong(fmt::format("{} is not removed: this run did not make it", file.path), file.path);
  if (::unlink(file.path.c_str()) != 0 && errno != ENOENT) return failed("remove", file.path);
  file.complete = false;
  file.pattern.reset();
  return {};
}

Status BenchFiles::preallocate(BenchFile& file) {
  const os::UniqueFd fd(::open(file.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd.valid()) return failed("create", file.path);
  if (const int code = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(file.bytes)); code != 0) {
    errno = code;
    return failed("reserve the blocks of", file.path);
  }
  if (::fsync(fd.get()) != 0) return failed("fsync", file.path);
  return {};
}

Status BenchFiles::drop_page_cache(const BenchFile& file) {
  const os::UniqueFd fd(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return failed("open", file.path);
  if (const int code = ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED); code != 0) {
    errno = code;
    return failed("drop the page cache of", file.path);
  }
  return {};
}

}  // namespace trunkline::cli
