#include "os/exit_timeout.h"

#include <cmath>
#include <cstdlib>

namespace trunkline::os {

std::chrono::milliseconds exit_timeout() {
  constexpr double kDefaultSeconds = 120;
  constexpr double kMaxSeconds = 1e9;                        // milliseconds could overflow beyond this
  const char* text = std::getenv("TRUNKLINE_EXIT_TIMEOUT");  // NOLINT(concurrency-mt-unsafe)
  double seconds = kDefaultSeconds;
  if (text != nullptr && *text != '\0') {
    char* end = nullptr;
    const double given = std::strtod(text, &end);
    if (*end == '\0' && given >= 0) seconds = std::fmin(given, kMaxSeconds);
  }
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

}  // namespace trunkline::os
