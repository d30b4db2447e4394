#include <fmt/format.h>

#include <string_view>

#include "trunkline/file.h"

namespace trunkline {

Result<Mode> parse_mode(std::string_view text) {
  if (text == "r" || text == "rb") return Mode::read;
  if (text == "r+" || text == "rb+" || text == "r+b") return Mode::read_write;
  if (text == "w" || text == "wb") return Mode::write;
  if (text == "x" || text == "xb") return Mode::create;
  return std::unexpected(make_error(ErrorKind::invalid_argument,
                                    fmt::format("mode: \"{}\" is not \"r\" (read), \"r+\" (read and write), "
                                                "\"w\" (create or empty) or \"x\" (create)",
                                                text)));
}

}  // namespace trunkline
