// Any text is either rejected as `format` or `corrupt`, or is byte for byte the record that was read.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/tier_record.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto found = trunkline::checkpoint::parse_tier_record(text, "fuzz");
  if (!found) {
    const auto kind = found.error().kind;
    if (kind != trunkline::ErrorKind::format && kind != trunkline::ErrorKind::corrupt) std::abort();
    return 0;
  }
  const auto again = trunkline::checkpoint::format_tier_record(*found);
  if (!again || *again != text) std::abort();
  return 0;
}
