#include "os/pci.h"

#include <charconv>
#include <string_view>

#include "os/read_text.h"

namespace trunkline::os {
namespace {

std::string_view first_line(std::string_view text) { return text.substr(0, text.find('\n')); }

std::optional<unsigned> number(std::string_view text) {
  unsigned value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

}  // namespace

PciLink read_pci_link(const std::string& address, const std::string& root) {
  const auto read = [&](const char* name) {
    const auto text = read_text(root + "/sys/bus/pci/devices/" + address + "/" + name);
    return text ? std::string(first_line(*text)) : std::string();
  };
  return {.speed = read("current_link_speed"),
          .most_speed = read("max_link_speed"),
          .width = number(read("current_link_width")).value_or(0),
          .most_width = number(read("max_link_width")).value_or(0),
          .numa_node = number(read("numa_node"))};  // -1: no node
}

}  // namespace trunkline::os
