// Any text is either rejected as `format` or `corrupt`, or is byte for byte the descriptor that was read. A
// text that is not a JSON object is used as a list of paths: a descriptor of them survives a round trip, and
// is rejected once a byte of it has changed.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "checkpoint/store_descriptor.h"

namespace {

using trunkline::checkpoint::StoreDescriptor;

void check(std::string_view text) {
  const auto found = trunkline::checkpoint::parse_store_descriptor(text, "fuzz");
  if (!found) {
    const auto kind = found.error().kind;
    if (kind != trunkline::ErrorKind::format && kind != trunkline::ErrorKind::corrupt) std::abort();
    return;
  }
  const auto again = trunkline::checkpoint::format_store_descriptor(*found);
  if (!again || *again != text) std::abort();
}

// More of them reach nothing new, and each of their bytes is formatted and parsed several times.
constexpr std::size_t kMaxPaths = 8;
constexpr std::size_t kMaxBytesOfPaths = 64;

// Paths are the lines of the text; those of odd length are former volumes.
StoreDescriptor described(std::string_view text) {
  StoreDescriptor made{.id = "0123456789abcdef", .volumes = {}, .first_commit = 1 + text.size() % kMaxPaths};
  text = text.substr(0, kMaxBytesOfPaths);
  while (!text.empty() && made.volumes.size() + made.former_volumes.size() < kMaxPaths) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.contains('\0')) continue;
    auto& paths = line.size() % 2 == 0 ? made.volumes : made.former_volumes;
    paths.push_back("/" + std::string(line));
  }
  return made;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), bytes);
  check(text);
  if (text.starts_with('{')) return 0;
  const StoreDescriptor made = described(text);
  auto written = trunkline::checkpoint::format_store_descriptor(made);
  if (!written) return 0;  // a path that is not UTF-8
  const auto read = trunkline::checkpoint::parse_store_descriptor(*written, "fuzz");
  if (!read || *read != made) std::abort();
  if (bytes == 0) return 0;
  (*written)[data[bytes - 1] % written->size()] ^= 1;
  if (trunkline::checkpoint::parse_store_descriptor(*written, "fuzz")) std::abort();
  return 0;
}
