// Numbers that stand for several measurements.
#pragma once

#include <vector>

namespace trunkline::cli {

// The middle value, the mean of the two middle ones for an even count; 0 of nothing.
double median(std::vector<double> values);

// a / b, and 0 where b is 0: nothing was measured then.
double ratio(double a, double b);

}  // namespace trunkline::cli
