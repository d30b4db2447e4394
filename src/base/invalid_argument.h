// The error of a caller's mistake, as what a function that returns a Result or a Status returns.
#pragma once

#include <expected>
#include <string>
#include <utility>

#include "trunkline/error.h"

namespace trunkline {

// `message` names the argument first: "keep: must be at least 1".
inline std::unexpected<Error> invalid_argument(std::string message) {
  return std::unexpected(make_error(ErrorKind::invalid_argument, std::move(message)));
}

}  // namespace trunkline
