#include "cli/bench/statistics.h"

#include <algorithm>

namespace trunkline::cli {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double ratio(double a, double b) { return b == 0 ? 0 : a / b; }

}  // namespace trunkline::cli
