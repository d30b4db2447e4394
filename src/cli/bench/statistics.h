// Summaries of several measurements.
#pragma once

#include <vector>

namespace trunkline::cli {

// The middle value, or the mean of the two middle ones for an even count; 0 for no values.
double median(std::vector<double> values);

// a / b, and 0 where b is 0, since nothing was measured then.
double ratio(double a, double b);

}  // namespace trunkline::cli
