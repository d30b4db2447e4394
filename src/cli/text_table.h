// Columns of text, the first aligned left and the others right.
#pragma once

#include <string>
#include <vector>

namespace trunkline::cli {

class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  // Omits columns without a value in any row.
  std::string render() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace trunkline::cli
