// Any text is either rejected or gives an object without repeated keys, which survives a round trip;
// member_text() finds nothing, or exactly the member's text.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/strict_json.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using Json = nlohmann::json;
  const std::string_view text(reinterpret_cast<const char*>(data), bytes);
  const auto deep = trunkline::parse_json_object(text, 100);
  const auto flat = trunkline::parse_json_object(text, 1);
  if (flat && (!deep || *deep != *flat)) std::abort();
  if (!deep) {
    if (deep.error().empty()) std::abort();
    return 0;
  }
  if (!deep->is_object() || text.find('\0') != std::string_view::npos) std::abort();
  const auto again = trunkline::parse_json_object(deep->dump(), 100);
  if (!again || *again != *deep) std::abort();
  for (const auto& [key, value] : deep->items()) {
    const std::string_view member = trunkline::member_text(text, key);
    if (member.empty()) continue;
    const Json parsed = Json::parse(member, nullptr, /*allow_exceptions=*/false);
    if (parsed.is_discarded() || parsed != value) std::abort();
  }
  return 0;
}
