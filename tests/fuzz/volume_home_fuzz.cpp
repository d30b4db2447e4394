// Any text is either rejected as `format` or `corrupt`, with a short message, or is byte for byte the record
// that was read, if it has the newest version. Later attempts have a valid checksum, so that the code behind
// it is reached too.
#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/volume_owner_record.h"
#include "trunkline/checksum.h"

namespace {

void check(std::string_view text) {
  using namespace trunkline;
  constexpr std::size_t kMaxMessageBytes = 1024;
  constexpr std::size_t kVersionBytes = std::string_view("trunkline home 2").size();
  const auto home = checkpoint::parse_volume_owner(text, "fuzz/home");
  if (!home) {
    if (home.error().kind != ErrorKind::format && home.error().kind != ErrorKind::corrupt) std::abort();
    if (home.error().message.size() > kMaxMessageBytes) std::abort();
    return;
  }
  if (!home->path.starts_with('/')) std::abort();
  const std::string written = checkpoint::format_volume_owner(*home);
  const bool is_newest = written.substr(0, kVersionBytes) == text.substr(0, kVersionBytes);
  if (is_newest && written != text) std::abort();
  const auto again = checkpoint::parse_volume_owner(written, "fuzz/home");
  if (!again || *again != *home) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), bytes);
  check(text);
  const std::uint32_t checksum = trunkline::crc32c(std::as_bytes(std::span(text)));
  for (const int version : {1, 2})
    check(fmt::format("trunkline home {} crc32c={:08x}\n{}", version, checksum, text));
  return 0;
}
