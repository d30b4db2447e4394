#include "cli/suggestion.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace trunkline::cli {
namespace {

std::size_t edit_distance(std::string_view one, std::string_view other) {
  std::vector<std::size_t> row(other.size() + 1);  // distances of a prefix of `one` to each prefix of `other`
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= one.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= other.size(); ++j) {
      const std::size_t replaced = diagonal + (one[i - 1] == other[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::optional<std::string> nearest_name(std::string_view given, std::span<const std::string> known) {
  std::optional<std::string> nearest;
  std::size_t least = 0;
  for (const std::string& name : known) {
    const std::size_t distance = edit_distance(given, name);
    if (3 * distance > std::max(given.size(), name.size()) || (nearest && distance >= least)) continue;
    nearest = name;
    least = distance;
  }
  return nearest;
}

}  // namespace trunkline::cli
