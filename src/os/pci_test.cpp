#include "os/pci.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

TEST(PciTest, TheLinkIsReadFromSysfs) {
  const test::TempDirectory root;
  const std::string device = root.path() + "/sys/bus/pci/devices/0000:17:00.0";
  std::filesystem::create_directories(device);
  const auto put = [&](const char* name, const char* text) { std::ofstream(device + "/" + name) << text; };
  put("current_link_speed", "16.0 GT/s PCIe\n");
  put("max_link_speed", "32.0 GT/s PCIe\n");
  put("current_link_width", "8\n");
  put("max_link_width", "16\n");
  put("numa_node", "1\n");
  const PciLink link = read_pci_link("0000:17:00.0", root.path());
  EXPECT_EQ(link.speed, "16.0 GT/s PCIe");
  EXPECT_EQ(link.most_speed, "32.0 GT/s PCIe");
  EXPECT_EQ(link.width, 8U);
  EXPECT_EQ(link.most_width, 16U);
  EXPECT_EQ(link.numa_node, 1U);
  put("numa_node", "-1\n");
  EXPECT_EQ(read_pci_link("0000:17:00.0", root.path()).numa_node, std::nullopt);
}

TEST(PciTest, AnUnknownDeviceHasDefaults) {
  const PciLink link = read_pci_link("ffff:ff:1f.7");
  EXPECT_EQ(link.speed, "");
  EXPECT_EQ(link.width, 0U);
  EXPECT_EQ(link.numa_node, std::nullopt);
}

}  // namespace
}  // namespace trunkline::os
