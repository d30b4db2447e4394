// How a PCI device is connected, according to sysfs.
#pragma once

#include <optional>
#include <string>

namespace trunkline::os {

struct PciLink {
  std::string speed;  // current, "32.0 GT/s PCIe"; idle devices slow down
  std::string most_speed;
  unsigned width = 0;  // lanes; 0 where unknown
  unsigned most_width = 0;
  std::optional<unsigned> numa_node;
};

// `address`: "0000:17:00.0". What cannot be read is left at its default; `root` is prepended to the paths
// that are examined.
PciLink read_pci_link(const std::string& address, const std::string& root = {});

}  // namespace trunkline::os
