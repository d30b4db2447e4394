#include "os/process_io.h"

#include <fstream>
#include <string>

namespace trunkline::os {

std::optional<std::uint64_t> bytes_read_by_calls() {
  std::ifstream counters("/proc/self/io");
  std::string name;
  std::uint64_t value = 0;
  while (counters >> name >> value) {
    if (name == "rchar:") return value;
  }
  return std::nullopt;
}

}  // namespace trunkline::os
