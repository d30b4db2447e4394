#include "records/source.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "os/unique_fd.h"

namespace trunkline::records {
namespace {

class FileSource : public Source {
 public:
  FileSource(std::string path, os::UniqueFd fd, std::uint64_t size)
      : path_(std::move(path)), fd_(std::move(fd)), size_(size) {}

  std::uint64_t size() const override { return size_; }

  Status read(std::uint64_t offset, std::span<std::byte> memory) override {
    while (!memory.empty()) {
      const ssize_t got = ::pread(fd_.get(), memory.data(), memory.size(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        return std::unexpected(system_error(
            errno, fmt::format("read {} bytes at {} of {}", memory.size(), offset, path_), path_));
      }
      if (got == 0) {
        return std::unexpected(make_error(
            ErrorKind::end_of_file,
            fmt::format("{}: ends at byte {}: it became shorter while it was indexed", path_, offset),
            path_));
      }
      memory = memory.subspan(static_cast<std::size_t>(got));
      offset += static_cast<std::uint64_t>(got);
    }
    return {};
  }

  void expect_random(bool random) override {
    ::posix_fadvise(fd_.get(), 0, 0, random ? POSIX_FADV_RANDOM : POSIX_FADV_NORMAL);
  }

 private:
  const std::string path_;
  const os::UniqueFd fd_;
  const std::uint64_t size_;
};

}  // namespace

Status MemorySource::read(std::uint64_t offset, std::span<std::byte> memory) {
  std::ranges::copy(bytes_.subspan(static_cast<std::size_t>(offset), memory.size()), memory.begin());
  return {};
}

Result<std::unique_ptr<Source>> open_source(const std::string& path) {
  os::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status{};
  if (!fd.valid() || ::fstat(fd.get(), &status) != 0)
    return std::unexpected(system_error(errno, fmt::format("open {}", path), path));
  const auto size = static_cast<std::uint64_t>(status.st_size);
  return std::make_unique<FileSource>(path, std::move(fd), size);
}

}  // namespace trunkline::records
