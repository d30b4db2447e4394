#include "tuning/tuning_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "os/file_lock.h"
#include "os/machine_id.h"
#include "os/unique_fd.h"
#include "support/temp_directory.h"
#include "tuning/storage.h"
#include "tuning/tuning_file.h"
#include "tuning/tuning_fixture.h"

namespace trunkline::tuning {
namespace {

using test::some_tuning;
using test::TempDirectory;

// Sets a variable of the environment, nullptr: none, until the end of its scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name); before != nullptr) before_ = before;
    if (value != nullptr)
      ::setenv(name, value, 1);
    else
      ::unsetenv(name);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() {
    if (before_)
      ::setenv(name_, before_->c_str(), 1);
    else
      ::unsetenv(name_);
  }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

Tuning tuning_of(const std::string& path) {
  Tuning tuning = some_tuning();
  tuning.machine = os::machine_id();
  tuning.paths = {path};
  tuning.storages = *storages_of(tuning.paths);
  return tuning;
}

TEST(TuningStore, LeavesAForeignFileThatTheEnvironmentNames) {
  const TempDirectory directory;
  const std::string file = directory.path() + "/config.json";
  write(file, "{\"of\": \"another program\"}");
  const Variable named("TRUNKLINE_TUNING", file.c_str());
  for (const auto& status : {check_storable(file), store(file, tuning_of(directory.path()))}) {
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(status.error().message.find("TRUNKLINE_TUNING names " + file), std::string::npos);
  }
  EXPECT_FALSE(forget_all(file));
  EXPECT_TRUE(std::filesystem::exists(file));
  EXPECT_FALSE(std::filesystem::exists(file + ".damaged"));
}

TEST(TuningStore, IsWhereTheEnvironmentSays) {
  const Variable home("HOME", "/home/u");
  {
    const Variable own("TRUNKLINE_TUNING", "/t/own.json");
    EXPECT_EQ(default_file(), "/t/own.json");
    EXPECT_FALSE(is_off());
  }
  const Variable unset("TRUNKLINE_TUNING", nullptr);
  {
    const Variable off("TRUNKLINE_TUNING", "off");
    EXPECT_TRUE(is_off());
  }
  const Variable config("XDG_CONFIG_HOME", "/config");
  EXPECT_EQ(default_file(), "/config/trunkline/tuning.json");
  const Variable relative("XDG_CONFIG_HOME", "config");
  EXPECT_EQ(default_file(), "/home/u/.config/trunkline/tuning.json");
  const Variable no_home("HOME", nullptr);
  EXPECT_EQ(default_file(), std::nullopt);
}

TEST(TuningStore, KeepsOneTuningForEachMachineAndStorages) {
  const TempDirectory directory;
  const std::string file = directory.file("new/folders/tuning.json");
  EXPECT_TRUE(load(file)->empty());
  Tuning other = some_tuning();
  other.machine = "fedcba9876543210";
  Tuning newer = some_tuning();
  newer.settings.lanes = 5;
  for (const Tuning& each : {some_tuning(), other, newer}) ASSERT_TRUE(store(file, each));
  EXPECT_EQ(*load(file), (std::vector{other, newer}));
}

TEST(TuningStore, MakesRoomForTheNewest) {
  const TempDirectory directory;
  const std::string file = directory.file("tuning.json");
  std::vector<Tuning> full;
  for (std::size_t index = 0; index < kMaxTunings; ++index) {
    full.push_back(some_tuning());
    full.back().machine = std::to_string(index);
  }
  write(file, format_tunings(full));
  ASSERT_TRUE(store(file, some_tuning()));
  const auto loaded = load(file);
  ASSERT_EQ(loaded->size(), kMaxTunings);
  EXPECT_EQ(loaded->front(), full[1]);
  EXPECT_EQ(loaded->back(), some_tuning());
}

TEST(TuningStore, LosesNoneOfTwoThatAreStoredAtTheSameTime) {
  const TempDirectory directory;
  const std::string file = directory.file("tuning.json");
  {
    std::vector<std::jthread> threads;
    for (int index = 0; index < 8; ++index) {
      threads.emplace_back([&, index] {
        Tuning tuning = some_tuning();
        tuning.machine = std::to_string(index);
        EXPECT_TRUE(store(file, tuning));
      });
    }
  }
  EXPECT_EQ(load(file)->size(), 8U);
}

TEST(TuningStore, SetsADamagedFileAside) {
  const TempDirectory directory;
  const std::string file = directory.file("tuning.json");
  write(file, "{damaged");
  EXPECT_EQ(load(file).error().kind, ErrorKind::format);
  EXPECT_TRUE(check_storable(file));
  ASSERT_TRUE(store(file, some_tuning()));
  EXPECT_EQ(load(file)->size(), 1U);
  EXPECT_TRUE(std::filesystem::exists(file + ".damaged"));
}

TEST(TuningStore, LeavesAFileOfANewerVersionAlone) {
  const TempDirectory directory;
  const std::string file = directory.file("tuning.json");
  const std::string text = R"({"format": "trunkline-tuning", "version": 2})";
  write(file, text);
  EXPECT_EQ(check_storable(file).error().kind, ErrorKind::unsupported);
  EXPECT_EQ(store(file, some_tuning()).error().kind, ErrorKind::unsupported);
  EXPECT_EQ(forget(file, std::vector<std::string>{"/"}).error().kind, ErrorKind::unsupported);
  EXPECT_EQ(std::filesystem::file_size(file), text.size());
}

TEST(TuningStore, ForgettingWhereNothingIsStoredCreatesNothing) {
  const TempDirectory directory;
  const std::string file = directory.file("config/tuning.json");
  EXPECT_EQ(*forget(file, std::vector<std::string>{directory.path()}), 0U);
  EXPECT_FALSE(*forget_all(file));
  EXPECT_FALSE(std::filesystem::exists(directory.file("config")));
}

TEST(TuningStore, ForgetsByStorageOrByName) {
  const TempDirectory directory;
  const std::string file = directory.file("tuning.json");
  const std::vector<std::string> here{directory.path()};
  EXPECT_EQ(*forget(file, here), 0U);
  ASSERT_TRUE(store(file, tuning_of(directory.path())));
  ASSERT_TRUE(store(file, some_tuning()));
  EXPECT_EQ(*forget(file, std::vector<std::string>{"/nowhere"}), 0U);
  // Another path of the same filesystem.
  EXPECT_EQ(*forget(file, std::vector<std::string>{file}), 1U);
  EXPECT_EQ(*load(file), std::vector{some_tuning()});
  Tuning gone = some_tuning();  // of a disk that this machine no longer has
  gone.machine = os::machine_id();
  ASSERT_TRUE(store(file, gone));
  EXPECT_EQ(*forget(file, std::vector<std::string>{"/data"}), 1U);
  EXPECT_EQ(*load(file), std::vector{some_tuning()});  // another machine's, with the same name
}

TEST(TuningStore, WritesNothingThatItCannotRead) {
  const TempDirectory directory;
  const std::string file = directory.file("tuning.json");
  ASSERT_TRUE(store(file, some_tuning()));
  Tuning large = some_tuning();
  large.storages.clear();
  for (int index = 100; index < 165; ++index)
    large.storages.push_back(
        {.filesystem = "ext4", .device = std::to_string(index), .id = "00000000000000ff"});
  EXPECT_FALSE(store(file, large));
  EXPECT_EQ(*load(file), std::vector{some_tuning()});
}

TEST(TuningStore, WaitsForAnotherProcessOnlyForSomeTime) {
  const TempDirectory directory;
  const std::string file = directory.file("tuning.json");
  ASSERT_TRUE(store(file, some_tuning()));
  const os::UniqueFd held(::open((file + ".lock").c_str(), O_RDWR | O_CLOEXEC));
  {
    const os::FileLock lock(held.get(), os::FileLock::Kind::exclusive);
    EXPECT_EQ(forget_all(file).error().code, EBUSY);
  }
  EXPECT_TRUE(*forget_all(file));
}

TEST(TuningStore, RemovesNothingOfOthers) {
  const TempDirectory directory;
  const std::string file = directory.file("ds.json");
  for (const std::string text : {"{\"train_batch_size\": 8}", "second", "third"}) {
    write(file, text);
    EXPECT_TRUE(*forget_all(file));
  }
  write(file, "fourth");
  ASSERT_TRUE(store(file, some_tuning()));
  const auto kept = [&](const std::string& name) { return std::filesystem::file_size(file + name); };
  EXPECT_EQ(kept(".damaged"), 23U);
  EXPECT_EQ(kept(".damaged-2"), 6U);
  EXPECT_EQ(kept(".damaged-3"), 5U);
  EXPECT_EQ(kept(".damaged-4"), 6U);
  const std::string pipe = directory.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(check_storable(pipe).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(store(pipe, some_tuning()).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(forget_all(pipe).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(forget(pipe, std::vector<std::string>{"/"}).error().kind, ErrorKind::invalid_argument);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
}

TEST(TuningStore, ForgetsAllWhateverTheFileHolds) {
  const TempDirectory directory;
  const std::string file = directory.file("tuning.json");
  EXPECT_FALSE(*forget_all(file));
  write(file, "damaged");
  EXPECT_TRUE(*forget_all(file));
  EXPECT_FALSE(std::filesystem::exists(file));
}

TEST(Storage, IsTheSameForAllPathsOfAFilesystem) {
  const TempDirectory directory;
  const auto storage = storage_of(directory.path());
  ASSERT_TRUE(storage) << storage.error().message;
  EXPECT_EQ(storage->id.size(), 16U);
  EXPECT_FALSE(storage->filesystem.empty());
  EXPECT_EQ(*storage_of(directory.file("not yet there")), *storage);
  EXPECT_EQ(storages_of(std::vector{directory.path(), directory.path()})->size(), 1U);
  EXPECT_FALSE(storage_of("/no/such/directory"));
  EXPECT_NE(*storage_of("/proc"), *storage);
}

}  // namespace
}  // namespace trunkline::tuning
