#include "base/creation_error.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>

namespace trunkline {

Error creation_error(int code, std::string_view action, std::string_view path, std::string_view directory) {
  struct stat status{};
  const bool exists = ::stat(std::string(directory).c_str(), &status) == 0;
  if (code == ENOENT && exists) {
    return {ErrorKind::system, code,
            fmt::format("cannot {}: no such file or directory (ENOENT); {} exists: it does not support new "
                        "files (as /proc does not), or a link leads into a directory that does not exist",
                        action, directory),
            std::string(path)};
  }
  if (code != ENOENT) return system_error(code, action, path);
  return {ErrorKind::system, code,
          fmt::format(
              "cannot {}: no such file or directory (ENOENT); a parent directory does not exist: create it "
              "(mkdir -p {})",
              action, directory),
          std::string(path)};
}

Error missing_directory_error(int code, std::string_view action, std::string_view directory) {
  if (code != ENOENT) return system_error(code, action, directory);
  return {
      ErrorKind::system, code,
      fmt::format("cannot {}: no such file or directory (ENOENT); check the path, or create it (mkdir -p {})",
                  action, directory),
      std::string(directory)};
}

}  // namespace trunkline
