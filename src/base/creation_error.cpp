#include "base/creation_error.h"

#include <fmt/format.h>

#include <cerrno>
#include <string>

namespace trunkline {

Error creation_error(int code, std::string_view action, std::string_view path, std::string_view directory) {
  if (code != ENOENT) return system_error(code, action, path);
  return {ErrorKind::system, code,
          fmt::format(
              "cannot {}: no such file or directory (ENOENT); a parent directory does not exist: create it "
              "(mkdir -p {})",
              action, directory),
          std::string(path)};
}

}  // namespace trunkline
