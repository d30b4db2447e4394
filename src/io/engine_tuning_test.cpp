// Engines and files under a tuning: what follows it, and what wins over it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <vector>

#include "io/engine_core.h"
#include "io/tuned_settings.h"
#include "os/machine_id.h"
#include "support/temp_directory.h"
#include "trunkline/file.h"
#include "trunkline/units.h"
#include "trunkline/volume.h"
#include "tuning/storage.h"
#include "tuning/tuning_file.h"
#include "tuning/tuning_fixture.h"

namespace trunkline {
namespace {

using tuning::Settings;
using tuning::Tuning;

constexpr std::uint64_t kTunedBlock = 64 * kKiB;

class EngineTuning : public testing::Test {
 protected:
  ~EngineTuning() override { ::setenv("TRUNKLINE_TUNING", "off", 1); }

  void write_tunings(const std::string& text) const {
    const std::string file = directory_.file("tuning.json");
    std::ofstream(file) << text;
    ::setenv("TRUNKLINE_TUNING", file.c_str(), 1);
  }

  void tune(const Settings& settings) const {
    Tuning tuning = test::some_tuning();
    tuning.machine = os::machine_id();
    tuning.storages = *tuning::storages_of(std::vector{directory_.path()});
    tuning.settings = settings;
    write_tunings(tuning::format_tunings({tuning}));
  }

  // Transfers that a read of 1 MiB through the lanes takes.
  std::uint64_t transfers(const Engine& engine, const OpenOptions& options = {}) const {
    const std::string path = directory_.file("data");
    std::ofstream(path) << std::string(kMiB, 'x');
    const auto file = File::open(engine, path, options);
    if (!file) return 0;
    auto memory = engine.allocate(kMiB);
    const std::uint64_t before = engine.stats().transfers;
    EXPECT_EQ(*file->async_pread(memory->span(), 0).result(), kMiB);
    return engine.stats().transfers - before;
  }

  test::TempDirectory directory_;
};

TEST_F(EngineTuning, GivesEachFileItsBlockSize) {
  tune({.block_bytes = kTunedBlock});
  const auto engine = Engine::create();
  EXPECT_EQ(transfers(*engine), kMiB / kTunedBlock);
  EXPECT_EQ(engine->config().block_bytes, 4 * kMiB);  // that of files elsewhere
  const auto passed = Engine::create({.block_bytes = 256 * kKiB});
  EXPECT_EQ(transfers(*passed), 4U);
}

TEST_F(EngineTuning, ReadsRangesInTheBlocksOfTheirFile) {
  tune({.block_bytes = kTunedBlock});
  const auto engine = Engine::create();
  const std::string path = directory_.file("data");
  std::ofstream(path) << std::string(kMiB, 'x');
  const auto file = File::open(*engine, path);
  auto memory = engine->allocate(kMiB);
  const std::uint64_t before = engine->stats().transfers;
  EXPECT_TRUE(file->read_ranges(memory->span(), {{.offset = 0, .length = kMiB, .position = 0}}));
  EXPECT_EQ(engine->stats().transfers - before, kMiB / kTunedBlock);
}

TEST_F(EngineTuning, ChoosesThePageCacheWhereItIsFaster) {
  tune({.direct = false});
  const auto engine = Engine::create();
  const auto explanation = engine->explain(directory_.path());
  EXPECT_FALSE(explanation->direct);
  EXPECT_NE(explanation->why.find("trunkline tune"), std::string::npos) << explanation->why;
  transfers(*engine);
  EXPECT_EQ(engine->stats().bytes_direct, 0U);
  ::setenv("TRUNKLINE_TUNING", "off", 1);
  if (!Engine::create()->explain(directory_.path())->direct) GTEST_SKIP() << "no direct I/O here";
  transfers(*engine, {.direct = Direct::always});  // passed: wins
  EXPECT_EQ(engine->stats().bytes_direct, kMiB);
}

TEST_F(EngineTuning, ConfiguresAnEngineByItsPaths) {
  tune({.backend = BackendKind::threads, .lanes = 3, .queue_depth = 5, .block_bytes = kTunedBlock});
  const auto engine = Engine::create({.paths = {directory_.path()}});
  EXPECT_EQ(engine->config().backend, BackendKind::threads);
  EXPECT_EQ(engine->config().lanes, 3U);
  EXPECT_EQ(engine->config().queue_depth, 5U);
  EXPECT_EQ(engine->config().block_bytes, kTunedBlock);
  EXPECT_TRUE(engine->explain(directory_.path())->tuning.in_effect);

  const auto passed = Engine::create({.lanes = 2, .queue_depth = 9, .paths = {directory_.path()}});
  EXPECT_EQ(passed->config().lanes, 2U);
  EXPECT_EQ(passed->config().queue_depth, 9U);
  const auto tuning = passed->explain(directory_.path())->tuning;
  EXPECT_FALSE(tuning.in_effect);
  EXPECT_EQ(tuning.time, "2026-01-31T23:59:59Z");
  EXPECT_NE(tuning.why.find("lanes=2"), std::string::npos) << tuning.why;
}

TEST_F(EngineTuning, WithoutPathsFollowsWhatAllTuningsAgreeOn) {
  tune({.backend = BackendKind::threads, .lanes = 3, .queue_depth = 5});
  EXPECT_EQ(Engine::create()->config().lanes, 3U);
  Tuning first = test::some_tuning();
  first.machine = os::machine_id();
  Tuning second = first;
  second.storages.front().device = "/dev/other";
  second.settings.lanes = 1;
  write_tunings(tuning::format_tunings({first, second}));
  ::setenv("TRUNKLINE_TUNING", "off", 1);
  const auto defaults = Engine::create()->config();
  write_tunings(tuning::format_tunings({first, second}));
  EXPECT_EQ(Engine::create()->config().lanes, defaults.lanes);
  EXPECT_EQ(Engine::create()->config().queue_depth, defaults.queue_depth);
}

TEST_F(EngineTuning, TunesNothingElse) {
  tune({.backend = BackendKind::threads, .lanes = 3, .block_bytes = kTunedBlock});
  // Paths that are not tuned: not what the tunings of others agree on.
  const auto engine = Engine::create({.paths = {"/proc"}});
  EXPECT_NE(engine->config().lanes, 3U);
  const auto tuning = engine->explain("/proc/self/status");
  ASSERT_TRUE(tuning) << tuning.error().message;
  EXPECT_EQ(tuning->tuning.time, "");
  EXPECT_FALSE(tuning->tuning.in_effect);
  const auto in_memory = Engine::create({.backend = BackendKind::memory, .paths = {directory_.path()}});
  EXPECT_NE(in_memory->config().lanes, 3U);
}

TEST_F(EngineTuning, IsIgnoredWhereItIsDamaged) {
  ::setenv("TRUNKLINE_TUNING", "off", 1);
  const auto defaults = Engine::create()->config();
  for (const std::string text : {"{\"format\"", R"({"format": "trunkline-tuning", "version": 2})"}) {
    write_tunings(text);
    const auto engine = Engine::create({.paths = {directory_.path()}});
    ASSERT_TRUE(engine);
    EXPECT_EQ(engine->config().lanes, defaults.lanes);
    EXPECT_EQ(transfers(*engine), 1U);
    const auto why = engine->explain(directory_.path())->tuning.why;
    EXPECT_NE(why.find("tuning.json"), std::string::npos) << why;
  }
}

TEST_F(EngineTuning, HoldsForAVolumeAsAWhole) {
  test::TempDirectory other("/dev/shm");
  const std::vector<std::string> both{directory_.path(), other.path()};
  Tuning tuning = test::some_tuning();
  tuning.machine = os::machine_id();
  tuning.storages = *tuning::storages_of(both);
  if (tuning.storages.size() < 2) GTEST_SKIP() << "/dev/shm is on the same filesystem";
  tuning.settings = {.block_bytes = kTunedBlock};
  write_tunings(tuning::format_tunings({tuning}));
  const auto engine = Engine::create();
  EXPECT_EQ(transfers(*engine), 1U);  // not that of one of the disks
  const auto why = engine->explain(directory_.path())->tuning.why;
  EXPECT_NE(why.find("together with others"), std::string::npos) << why;
  const auto volume = Volume::create(both);
  const auto file = volume->open(*engine, "striped", {.mode = Mode::create});
  ASSERT_TRUE(file) << file.error().message;
  auto memory = engine->allocate(kMiB);
  const std::uint64_t before = engine->stats().transfers;
  EXPECT_TRUE(file->async_pwrite(memory->span(), 0).result());
  EXPECT_EQ(engine->stats().transfers - before, kMiB / kTunedBlock);
}

TEST(TunedOptions, LeaveLanesAloneForAnotherBackend) {
  const Settings settings{.backend = BackendKind::libaio, .lanes = 7, .queue_depth = 8};
  EXPECT_EQ(io::tuned_options({.backend = BackendKind::threads}, settings, true), std::nullopt);
  EXPECT_EQ(io::tuned_options({.backend = BackendKind::libaio}, settings, true)->lanes, 7U);
  EXPECT_EQ(io::tuned_options({}, settings, true)->backend, BackendKind::libaio);
  EXPECT_EQ(io::tuned_options({.lanes = 2}, settings, true)->lanes, 2U);
  EXPECT_EQ(io::tuned_options({}, {}, true), std::nullopt);
}

TEST(TunedPolicy, NeverOverridesWhatWasPassed) {
  const EngineConfig config{};
  Tuning tuning;
  tuning.settings.direct = false;
  EXPECT_EQ(io::tuned_policy(config, Direct::automatic, &tuning), os::DirectPolicy::measured_slower);
  EXPECT_EQ(io::tuned_policy(config, Direct::unless_cached, &tuning), os::DirectPolicy::measured_slower);
  EXPECT_EQ(io::tuned_policy(config, Direct::always, &tuning), os::DirectPolicy::always);
  EXPECT_EQ(io::tuned_policy(config, Direct::automatic, nullptr), os::DirectPolicy::automatic);
  EngineConfig gds = config;
  gds.gpu = GpuPath::gds;
  EXPECT_EQ(io::tuned_policy(gds, Direct::automatic, &tuning), os::DirectPolicy::automatic);
  tuning.settings.direct = true;
  EXPECT_EQ(io::tuned_policy(config, Direct::automatic, &tuning), os::DirectPolicy::measured_faster);
  EXPECT_EQ(io::tuned_policy(config, Direct::never, &tuning), os::DirectPolicy::never);
}

TEST(ExplainTuning, SaysWhyABlockIsNotUsed) {
  Tuning tuning;
  tuning.settings.block_bytes = 128 * kKiB;
  EngineConfig config{};
  config.block_bytes = config.slot_bytes = kMiB;
  os::DirectLimits limits;
  EXPECT_TRUE(io::explain_tuning(config, false, limits, &tuning, "").in_effect);
  const auto passed = io::explain_tuning(config, true, limits, &tuning, "");
  EXPECT_FALSE(passed.in_effect);
  EXPECT_NE(passed.why.find("was passed, and is used instead"), std::string::npos) << passed.why;
  limits.offset_alignment = 256 * kKiB;
  const auto unaligned = io::explain_tuning(config, false, limits, &tuning, "");
  EXPECT_FALSE(unaligned.in_effect);
  EXPECT_NE(unaligned.why.find("blocks of 128 KiB are not used"), std::string::npos) << unaligned.why;
  limits.offset_alignment = 4096;
  config.block_bytes = config.slot_bytes = 64 * kKiB;
  EXPECT_FALSE(io::explain_tuning(config, false, limits, &tuning, "").in_effect);
}

TEST(TunedBlock, FitsTheSlotsOfTheEngine) {
  FileCore file(std::nullopt, "f", {}, {});
  file.members.emplace_back().pair.limits.offset_alignment = 4096;
  Tuning tuning;
  tuning.settings.block_bytes = 128 * kKiB;
  EngineConfig config{};
  config.slot_bytes = kMiB;
  EXPECT_EQ(io::tuned_block_bytes(config, false, file, &tuning), 128 * kKiB);
  EXPECT_EQ(io::tuned_block_bytes(config, true, file, &tuning), 0U);
  EXPECT_EQ(io::tuned_block_bytes(config, false, file, nullptr), 0U);
  file.members.front().pair.limits.offset_alignment = 256 * kKiB;
  EXPECT_EQ(io::tuned_block_bytes(config, false, file, &tuning), 0U);
  file.members.front().pair.limits.offset_alignment = 4096;
  config.slot_bytes = 64 * kKiB;
  EXPECT_EQ(io::tuned_block_bytes(config, false, file, &tuning), 0U);
}

}  // namespace
}  // namespace trunkline
