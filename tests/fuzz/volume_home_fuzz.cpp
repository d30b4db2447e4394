// Any text either is refused as `format` or `corrupt`, with a short message, or is byte for byte the record
// of what was read. The second try has the right checksum, so that what lies behind it is reached too.
#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/home_record.h"
#include "trunkline/checksum.h"

namespace {

void check(std::string_view text) {
  using namespace trunkline;
  constexpr std::size_t kMaxMessageBytes = 1024;
  const auto home = checkpoint::parse_home(text, "fuzz/home");
  if (!home) {
    if (home.error().kind != ErrorKind::format && home.error().kind != ErrorKind::corrupt) std::abort();
    if (home.error().message.size() > kMaxMessageBytes) std::abort();
    return;
  }
  if (!home->path.starts_with('/') || checkpoint::format_home(*home) != text) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), bytes);
  check(text);
  const std::uint32_t checksum = trunkline::crc32c(std::as_bytes(std::span(text)));
  check(fmt::format("trunkline home 1 crc32c={:08x}\n{}", checksum, text));
  return 0;
}
