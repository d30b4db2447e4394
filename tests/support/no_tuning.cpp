// Linked into every test program: a developer's own tunings change no test.
#include <cstdlib>

namespace {

[[maybe_unused]] const int ignored =
    ::setenv("TRUNKLINE_TUNING", "off", 1);  // NOLINT(concurrency-mt-unsafe): before any thread

}  // namespace
