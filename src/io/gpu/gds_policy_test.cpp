// Table tests of the rules for GPUDirect Storage, and tests of the refusal log.
#include "io/gpu/gds_policy.h"

#include <gtest/gtest.h>

#include "io/refusal_log.h"

namespace trunkline::io {
namespace {

TEST(GdsPolicy, RulesThatExcludeAFile) {
  struct Case {
    GpuPath path;
    bool is_direct;
    std::optional<std::string> why;
  };
  const std::vector<Case> cases = {
      {GpuPath::automatic, true, std::nullopt},
      {GpuPath::gds, true, std::nullopt},
      {GpuPath::bounce, true, "gpu=\"bounce\" was requested"},
      {GpuPath::bounce, false, "gpu=\"bounce\" was requested"},
      {GpuPath::automatic, false, "direct I/O is not used: tmpfs"},
      {GpuPath::gds, false, "direct I/O is not used: tmpfs"},
  };
  for (const Case& each : cases) {
    os::FilePair file;
    file.limits.usable = each.is_direct;
    file.limits.why = "tmpfs";
    EXPECT_EQ(why_never_gds(each.path, file), each.why);
  }
}

TEST(GdsPolicy, CompatibilityModeIsUsedOnlyWhenRequired) {
  EXPECT_EQ(gds_probe_for(GpuPath::gds), GdsProbe::correct_data);
  EXPECT_EQ(gds_probe_for(GpuPath::automatic), GdsProbe::bypasses_host);
  EXPECT_TRUE(is_gds_required(GpuPath::gds));
  EXPECT_FALSE(is_gds_required(GpuPath::automatic));
}

TEST(RefusalLog, KeepsTheFirstOfEachKindInAFixedOrder) {
  RefusalLog log;
  EXPECT_TRUE(log.all().empty());
  log.note(Refused::gds, make_error(ErrorKind::unsupported, "one"));
  log.note(Refused::registered_buffers, make_error(ErrorKind::unsupported, "two"));
  log.note(Refused::gds, make_error(ErrorKind::unsupported, "three"));
  const auto all = log.all();
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].what, "registered buffers");
  EXPECT_EQ(all[0].why, "two");
  EXPECT_EQ(all[1].what, "GPUDirect Storage");
  EXPECT_EQ(all[1].why, "one");
}

}  // namespace
}  // namespace trunkline::io
