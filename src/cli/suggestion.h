// The name that was probably meant where an unknown one was given.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace trunkline::cli {

// The known name with the smallest edit distance to `given` (Levenshtein: characters inserted, removed or
// replaced), the first of equal ones; none if more than a third of the characters differ.
std::optional<std::string> nearest_name(std::string_view given, std::span<const std::string> known);

}  // namespace trunkline::cli
