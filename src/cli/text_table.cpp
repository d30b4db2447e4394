#include "cli/text_table.h"

#include <fmt/format.h>

#include <algorithm>

namespace trunkline::cli {

std::string TextTable::render() const {
  std::vector<std::size_t> widths(rows_.front().size(), 0);
  for (std::size_t column = 0; column < widths.size(); ++column) {
    bool used = false;
    for (std::size_t row = 1; row < rows_.size(); ++row) {
      if (column >= rows_[row].size() || rows_[row][column].empty()) continue;
      used = true;
      widths[column] = std::max(widths[column], rows_[row][column].size());
    }
    if (used) widths[column] = std::max(widths[column], rows_.front()[column].size());
  }
  std::string result;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t column = 0; column < widths.size(); ++column) {
      if (widths[column] == 0) continue;
      const std::string cell = column < row.size() ? row[column] : "";
      line += column == 0 ? fmt::format("{:<{}}", cell, widths[column])
                          : fmt::format("  {:>{}}", cell, widths[column]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    result += line + "\n";
  }
  return result;
}

}  // namespace trunkline::cli
