#include "os/exit_patience.h"

#include <cmath>
#include <cstdlib>

namespace trunkline::os {

std::chrono::milliseconds exit_patience() {
  constexpr double kDefaultSeconds = 120;
  constexpr double kMostSeconds = 1e9;                       // milliseconds could overflow beyond this
  const char* text = std::getenv("TRUNKLINE_EXIT_TIMEOUT");  // NOLINT(concurrency-mt-unsafe)
  double seconds = kDefaultSeconds;
  if (text != nullptr && *text != '\0') {
    char* end = nullptr;
    const double given = std::strtod(text, &end);
    if (*end == '\0' && given >= 0) seconds = std::fmin(given, kMostSeconds);
  }
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

}  // namespace trunkline::os
