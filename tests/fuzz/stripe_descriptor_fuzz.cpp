// Any text is either rejected as `format` or gives a descriptor that survives a round trip.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "volume/descriptor.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace trunkline;
  const std::string_view text(reinterpret_cast<const char*>(data), bytes);
  const auto descriptor = volume::parse_descriptor(text, "fuzz.stripe");
  if (!descriptor) {
    if (descriptor.error().kind != ErrorKind::format) std::abort();
    return 0;
  }
  if (descriptor->member >= descriptor->members || !volume::is_stripe_size(descriptor->stripe_bytes))
    std::abort();
  const auto again = volume::parse_descriptor(volume::format_descriptor(*descriptor), "fuzz.stripe");
  if (!again || *again != *descriptor) std::abort();
  return 0;
}
