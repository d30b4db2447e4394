#include "tuning/tuning_table.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "os/machine_id.h"
#include "support/temp_directory.h"
#include "tuning/storage.h"
#include "tuning/tuning_file.h"
#include "tuning/tuning_fixture.h"

namespace trunkline::tuning {
namespace {

using test::some_tuning;
using test::TempDirectory;

Tuning tuning_of(const std::vector<std::string>& paths) {
  Tuning tuning = some_tuning();
  tuning.machine = os::machine_id();
  tuning.storages = *storages_of(paths);
  return tuning;
}

// The table that an engine gets while the tuning file has this text.
std::shared_ptr<const TuningTable> table_of(const TempDirectory& directory, const std::string& text) {
  const std::string file = directory.file("tuning.json");
  std::ofstream(file) << text;
  ::setenv("TRUNKLINE_TUNING", file.c_str(), 1);
  auto table = TuningTable::load();
  ::setenv("TRUNKLINE_TUNING", "off", 1);
  return table;
}

TEST(TuningTable, FindsByFilesystemAndDevice) {
  const TempDirectory directory;
  const TuningTable table({tuning_of({directory.path()})});
  for (const std::string& path :
       {directory.path(), directory.file("not yet there"), std::string("/var/tmp")}) {
    const Tuning* const found = table.find(std::vector{path});
    ASSERT_NE(found, nullptr) << path;
    EXPECT_EQ(found->settings, some_tuning().settings);
  }
  EXPECT_EQ(table.find(std::vector<std::string>{"/proc"}), nullptr);
  EXPECT_EQ(table.find(std::vector<std::string>{"/no/such/directory"}), nullptr);
  EXPECT_EQ(table.find({}), nullptr);
}

TEST(TuningTable, FindsSeveralPathsOnlyTogether) {
  const TempDirectory directory;
  const std::vector<std::string> both{directory.path(), "/proc"};
  const std::vector<std::string> turned{"/proc", directory.path()};
  const TuningTable table({tuning_of(both)});
  EXPECT_NE(table.find(both), nullptr);
  EXPECT_NE(table.find(turned), nullptr);
  EXPECT_EQ(table.find(std::vector{directory.path()}), nullptr);
  EXPECT_NE(table.find_shared(directory.path()), nullptr);
  EXPECT_EQ(table.find_shared("/sys"), nullptr);
  const TuningTable of_one({tuning_of({directory.path()})});
  EXPECT_EQ(of_one.find(both), nullptr);
  EXPECT_EQ(of_one.find_shared(directory.path()), nullptr);
}

TEST(TuningTable, AgreesOnWhatAllTuningsSay) {
  Tuning first = some_tuning();
  Tuning second = some_tuning();
  second.settings.block_bytes = 4096;
  const TuningTable table({first, second});
  EXPECT_EQ(table.agreed(), (Settings{.backend = BackendKind::libaio, .lanes = 3, .queue_depth = 7}));
  second.settings.lanes = 4;
  EXPECT_EQ(TuningTable({first, second}).agreed(), Settings{});
  EXPECT_EQ(TuningTable(std::vector<Tuning>{}).agreed(), Settings{});
}

TEST(TuningTable, IgnoresAFileThatIsDamagedOrNewerAndSaysSo) {
  const TempDirectory directory;
  for (const std::string text : {"{", R"({"format": "trunkline-tuning", "version": 9})"}) {
    const auto table = table_of(directory, text);
    EXPECT_TRUE(table->empty());
    EXPECT_NE(table->problem().find("tuning.json"), std::string::npos) << table->problem();
  }
}

TEST(TuningTable, IgnoresTuningsOfOtherMachines) {
  const TempDirectory directory;
  Tuning other = tuning_of({directory.path()});
  other.machine = "another";
  auto table = table_of(directory, format_tunings({other}));
  EXPECT_TRUE(table->empty());
  EXPECT_NE(table->problem().find("other machines"), std::string::npos) << table->problem();
  table = table_of(directory, format_tunings({other, tuning_of({directory.path()})}));
  EXPECT_NE(table->find(std::vector{directory.path()}), nullptr);
  EXPECT_EQ(table->problem(), "");
}

TEST(TuningTable, IsEmptyWhereItIsTurnedOff) {
  const auto table = TuningTable::load();  // tests/support/no_tuning.cpp
  EXPECT_TRUE(table->empty());
  EXPECT_NE(table->problem().find("TRUNKLINE_TUNING"), std::string::npos);
}

TEST(MachineId, IsTheSameEachTime) {
  EXPECT_EQ(os::machine_id().size(), 16U);
  EXPECT_EQ(os::machine_id(), os::machine_id());
}

}  // namespace
}  // namespace trunkline::tuning
