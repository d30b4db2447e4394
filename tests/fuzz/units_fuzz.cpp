// Sizes and other words in arguments: either rejected as `invalid_argument`, with a short message, or parsed
// correctly.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "trunkline/engine.h"
#include "trunkline/file.h"
#include "trunkline/units.h"

namespace {

template <class T>
void check(const trunkline::Result<T>& result, std::size_t input_bytes) {
  if (result) return;
  if (result.error().kind != trunkline::ErrorKind::invalid_argument) std::abort();
  if (result.error().message.size() > 1024 + input_bytes) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace trunkline;
  const std::string_view text(reinterpret_cast<const char*>(data), bytes);
  const auto size = parse_bytes(text);
  check(size, 0);
  if (size) {
    const auto again = parse_bytes(std::to_string(*size));
    if (!again || *again != *size) std::abort();
    const auto padded = parse_bytes(" " + std::string(text) + "\t");
    if (!padded || *padded != *size) std::abort();
    if (format_bytes(*size).empty() || format_rate(static_cast<double>(*size)).empty()) std::abort();
  }
  check(parse_mode(text), bytes);
  check(parse_backend(text), bytes);
  check(parse_gpu_path(text), bytes);
  return 0;
}
