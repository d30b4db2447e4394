#include "os/mountinfo.h"

#include <gtest/gtest.h>

namespace trunkline::os {
namespace {

constexpr std::string_view kMounts =
    "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"
    "23 22 0:21 / /proc rw,nosuid shared:5 master:2 propagate_from:1 - proc proc rw\n"
    "30 22 0:40 /@home /home rw shared:7 - btrfs /dev/sdb1 rw,subvol=/@home\n"
    "31 22 0:50 / /mnt/with\\040space\\134and\\011tab rw - nfs4 server:/an\\040export rw\n"
    "32 22 253:0 / /data rw - xfs /dev/mapper/vg-data rw\n"
    "33 32 0:60 / /data/fast rw - tmpfs tmpfs rw\n"
    "34 22 253:1 / /data rw - ext4 /dev/mapper/vg-cover rw\n";

MountQuery at(std::string path, DeviceId device = {}, std::uint64_t id = 0) {
  return {id, device, std::move(path)};
}

TEST(ParseMountinfo, ReadsFieldsAndEscapes) {
  const auto mounts = parse_mountinfo(kMounts);
  ASSERT_EQ(mounts.size(), 7U);
  EXPECT_EQ(mounts[0].id, 22U);
  EXPECT_EQ(mounts[0].device, (DeviceId{259, 2}));
  EXPECT_EQ(mounts[0].point, "/");
  EXPECT_EQ(mounts[0].filesystem, "ext4");
  EXPECT_EQ(mounts[0].source, "/dev/nvme0n1p2");
  EXPECT_EQ(mounts[1].filesystem, "proc") << "several optional fields";
  EXPECT_EQ(mounts[2].source, "/dev/sdb1");
  EXPECT_EQ(mounts[3].point, "/mnt/with space\\and\ttab") << "no optional field";
  EXPECT_EQ(mounts[3].source, "server:/an export");
}

TEST(ParseMountinfo, SkipsMalformedLines) {
  EXPECT_TRUE(parse_mountinfo("").empty());
  EXPECT_TRUE(parse_mountinfo("\n\n").empty());
  EXPECT_TRUE(parse_mountinfo("x 1 0:1 / / rw - ext4 src rw\n").empty());
  EXPECT_TRUE(parse_mountinfo("1 1 0 / / rw - ext4 src rw\n").empty());
  EXPECT_TRUE(parse_mountinfo("1 1 0:1 / / rw shared:1\n").empty()) << "cut off before the separator";
  const auto mounts = parse_mountinfo("garbage\n1 1 0:1 / / rw - ext4 src rw");
  ASSERT_EQ(mounts.size(), 1U) << "a last line without a newline counts";
  EXPECT_EQ(mounts[0].source, "src");
}

TEST(FindMount, TheMountIdDecides) {
  const auto mounts = parse_mountinfo(kMounts);
  const Mount* mount = find_mount(mounts, at("/data/fast/x", {0, 60}, 32));
  ASSERT_NE(mount, nullptr);
  EXPECT_EQ(mount->source, "/dev/mapper/vg-data");
}

TEST(FindMount, PrefersTheDeepestOfTheSameDevice) {
  const auto mounts = parse_mountinfo(kMounts);
  EXPECT_EQ(find_mount(mounts, at("/usr/lib", {259, 2}))->point, "/");
  EXPECT_EQ(find_mount(mounts, at("/data/fast/x", {0, 60}))->filesystem, "tmpfs");
  EXPECT_EQ(find_mount(mounts, at("/data/fast/x", {253, 1}))->source, "/dev/mapper/vg-cover")
      << "/data/fast of the covered mount cannot be reached any more";
  EXPECT_EQ(find_mount(mounts, at("/data", {253, 1}))->source, "/dev/mapper/vg-cover");
}

TEST(FindMount, MatchesByPathWhereDeviceIdsAreAnonymous) {
  const auto mounts = parse_mountinfo(kMounts);
  EXPECT_EQ(find_mount(mounts, at("/home/user", {0, 77}))->filesystem, "btrfs");
  EXPECT_EQ(find_mount(mounts, at("/homely", {0, 77}))->point, "/") << "a prefix of the name is not a parent";
  EXPECT_EQ(find_mount(mounts, at("/data", {0, 77}))->source, "/dev/mapper/vg-cover")
      << "the later mount covers the earlier";
}

TEST(FindMount, ReturnsNullWhenNoneFits) {
  EXPECT_EQ(find_mount({}, at("/x")), nullptr);
  EXPECT_EQ(find_mount(parse_mountinfo(kMounts), at("relative")), nullptr);
}

}  // namespace
}  // namespace trunkline::os
