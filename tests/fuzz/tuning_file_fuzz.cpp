// Any text is either rejected as `format` or `unsupported`, or gives tunings that survive a round trip and
// that an engine can follow.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tuning/tuning_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace trunkline;
  const std::string_view text(reinterpret_cast<const char*>(data), bytes);
  const auto tunings = tuning::parse_tunings(text, "fuzz.json");
  if (!tunings) {
    const ErrorKind kind = tunings.error().kind;
    if (kind != ErrorKind::format && kind != ErrorKind::unsupported) std::abort();
    return 0;
  }
  for (const tuning::Tuning& each : *tunings) {
    if (!tuning::are_valid(each.settings) || each.storages.empty() || each.rates.size() != tuning::kPatterns)
      std::abort();
  }
  const auto again = tuning::parse_tunings(tuning::format_tunings(*tunings), "fuzz.json");
  if (!again || *again != *tunings) std::abort();
  return 0;
}
