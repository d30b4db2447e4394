// The file in which tunings are kept (docs/formats/tuning.md): its text, without I/O.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/error.h"
#include "tuning/tuning.h"

namespace trunkline::tuning {

inline constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;
inline constexpr std::size_t kMaxTunings = 256;
inline constexpr std::size_t kMaxStorages = 64;  // of one tuning

std::string format_tunings(const std::vector<Tuning>& tunings);

// Accepts what format_tunings() writes, with any white space and order of keys, and nothing else:
// `unsupported` for a newer version, `format` for everything that is not such a file. `path` is for the
// message; nothing is read from it.
Result<std::vector<Tuning>> parse_tunings(std::string_view text, const std::string& path);

}  // namespace trunkline::tuning
