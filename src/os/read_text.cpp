#include "os/read_text.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "os/unique_fd.h"

namespace trunkline::os {

Result<std::string> read_text(const std::string& path, std::size_t max_bytes) {
  constexpr std::size_t kPieceBytes = 64 << 10;
  // O_NONBLOCK: opening a pipe without a writer would wait forever.
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return std::unexpected(system_error(errno, "open " + path, path));
  std::string text;
  while (text.size() < max_bytes) {
    const std::size_t have = text.size();
    text.resize(have + std::min(kPieceBytes, max_bytes - have));
    const ssize_t got = ::read(fd.get(), text.data() + have, text.size() - have);
    const int code = errno;
    text.resize(have + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) break;
    if (got < 0 && code != EINTR) return std::unexpected(system_error(code, "read " + path, path));
  }
  return text;
}

}  // namespace trunkline::os
