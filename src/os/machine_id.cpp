#include "os/machine_id.h"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <cstdint>
#include <string_view>

#include "os/read_text.h"

namespace trunkline::os {
namespace {

// FNV-1a: http://www.isthe.com/chongo/tech/comp/fnv/
std::uint64_t hash(std::string_view text) {
  std::uint64_t value = 0xcbf29ce484222325;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return value;
}

}  // namespace

std::string machine_id() {
  constexpr std::size_t kMostBytes = 256;
  std::string seed = "trunkline ";
  const auto id = read_text("/etc/machine-id", kMostBytes);
  struct utsname name{};
  if (id && !id->empty() && *id != "\n")
    seed += *id;
  else if (::uname(&name) == 0)
    seed += static_cast<const char*>(name.nodename);
  return fmt::format("{:016x}", hash(seed));
}

}  // namespace trunkline::os
