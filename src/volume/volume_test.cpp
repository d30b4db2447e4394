#include "trunkline/volume.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>

#include "support/few_descriptors.h"
#include "support/sanitizers.h"
#include "support/test_memory.h"
#include "volume/volume_fixture.h"

namespace trunkline {
namespace {

using test::VolumeTest;

std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t seed = 1) {
  std::vector<std::byte> data(bytes);
  test::fill_random(data, seed);
  return data;
}

TEST_F(VolumeTest, CreateChecksItsArguments) {
  const auto paths = directories(2);
  const auto kind_of = [](const std::vector<std::string>& list, std::uint64_t stripe_bytes = kStripe) {
    const auto volume = Volume::create(list, {.stripe_bytes = stripe_bytes});
    return volume ? std::nullopt : std::optional(volume.error().kind);
  };
  EXPECT_EQ(kind_of(paths), std::nullopt);
  EXPECT_EQ(kind_of({}), ErrorKind::invalid_argument);
  for (const std::uint64_t stripe_bytes : {0ULL, 1ULL, 4095ULL, 6000ULL, (1ULL << 30) + 4096})
    EXPECT_EQ(kind_of(paths, stripe_bytes), ErrorKind::invalid_argument) << stripe_bytes;
  EXPECT_EQ(Volume::create({paths[0], root_.file("none")}).error().code, ENOENT);
  std::ofstream(root_.file("plain")) << "x";
  EXPECT_EQ(Volume::create({paths[0], root_.file("plain")}).error().code, ENOTDIR);
}

TEST_F(VolumeTest, ADirectoryCannotBeGivenTwice) {
  const auto paths = directories(2);
  ASSERT_EQ(::symlink(paths[0].c_str(), root_.file("link").c_str()), 0);
  for (const std::string& again : {paths[0], paths[0] + "/", paths[1] + "/../d0", root_.file("link")}) {
    const auto volume = Volume::create({paths[0], paths[1], again});
    ASSERT_FALSE(volume) << again;
    EXPECT_EQ(volume.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(volume.error().message.find(again), std::string::npos) << volume.error().message;
  }
}

TEST_F(VolumeTest, RejectsNamesThatAreNotPlainFileNames) {
  const Volume volume = make(2);
  for (const std::string& name : {std::string(), std::string("."), std::string(".."), std::string("a/b"),
                                  std::string("../a"), std::string("a\0b", 3), std::string(201, 'n')}) {
    EXPECT_EQ(open(volume, name, Mode::write).error().kind, ErrorKind::invalid_argument) << name;
    EXPECT_EQ(volume.remove(name).error().kind, ErrorKind::invalid_argument) << name;
  }
  EXPECT_TRUE(all_files().empty());
  const std::string longest(200, 'n');
  EXPECT_TRUE(store(volume, longest, pattern(10)));
  EXPECT_EQ(fetch(volume, longest), pattern(10));
}

TEST_F(VolumeTest, MembersHoldTheirStripeUnits) {
  const Volume volume = make(3);
  const auto data = pattern(3 * kStripe + 100);
  ASSERT_TRUE(store(volume, "f", data));
  EXPECT_EQ(all_files(), (std::vector<std::string>{"d0/f.0", "d0/f.stripe", "d1/f.1", "d1/f.stripe", "d2/f.2",
                                                   "d2/f.stripe"}));
  std::ifstream second(in(1, "f.1"), std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(second), {}};
  ASSERT_EQ(bytes.size(), kStripe);
  EXPECT_EQ(std::memcmp(bytes.data(), data.data() + kStripe, kStripe), 0);
  EXPECT_EQ(std::filesystem::file_size(in(0, "f.0")), kStripe + 100);
}

TEST_F(VolumeTest, RandomReadsWritesAndSizesMatchAModel) {
  constexpr std::uint64_t kMaxBytes = 300'000;
  std::mt19937_64 random(17);
  for (const std::size_t members : {1, 2, 3, 5}) {
    const Volume volume = make(members);
    std::vector<std::byte> model;
    auto file = open(volume, "model", Mode::write);
    ASSERT_TRUE(file) << file.error().message;
    for (int round = 0; round < 120; ++round) {
      const std::uint64_t offset = random() % kMaxBytes;
      const std::uint64_t length = random() % 50'000;
      switch (random() % 6) {
        case 0: {  // reopen
          ASSERT_TRUE(file->close());
          file = open(volume, "model", Mode::read_write);
          ASSERT_TRUE(file) << file.error().message;
          break;
        }
        case 1: {  // shrink or grow
          ASSERT_TRUE(file->truncate(offset));
          model.resize(offset);
          break;
        }
        case 2:
        case 3: {
          auto data = pattern(length, random());
          const auto put = file->pwrite(std::span(data), offset);
          ASSERT_TRUE(put) << put.error().message;
          if (model.size() < offset + length && length > 0) model.resize(offset + length);
          std::ranges::copy(data, model.begin() + (length > 0 ? static_cast<std::ptrdiff_t>(offset) : 0));
          break;
        }
        default: {
          std::vector<std::byte> data(length);
          const auto got = file->pread(std::span(data), offset);
          if (length > 0 && offset + length > model.size()) {
            ASSERT_FALSE(got);
            ASSERT_EQ(got.error().kind, ErrorKind::end_of_file);
          } else if (length > 0) {
            ASSERT_TRUE(got) << got.error().message;
            ASSERT_EQ(std::memcmp(data.data(), model.data() + offset, length), 0) << offset << " " << length;
          }
        }
      }
      ASSERT_EQ(file->size(), model.size());
    }
    ASSERT_TRUE(file->sync());
    ASSERT_TRUE(file->close());
    ASSERT_EQ(fetch(volume, "model"), model);
    ASSERT_TRUE(volume.remove("model"));  // the next one has some of the directories
  }
}

TEST_F(VolumeTest, ReadingUsesTheStripeUnitOfTheFile) {
  const auto data = pattern(100'000);
  ASSERT_TRUE(store(make(directories(3), 4096), "f", data));
  const Volume other = make(directories(3), 65536);
  EXPECT_EQ(fetch(other, "f"), data);
  auto file = open(other, "f", Mode::read_write);
  ASSERT_TRUE(file) << file.error().message;
  auto tail = pattern(50'000, 2);
  ASSERT_TRUE(file->pwrite(std::span(tail), 90'000));
  auto expected = data;
  expected.resize(140'000);
  std::ranges::copy(tail, expected.begin() + 90'000);
  EXPECT_EQ(fetch(make(directories(3), 8192), "f"), expected);
}

TEST_F(VolumeTest, WriteReplacesALongerFileAndItsLayout) {
  ASSERT_TRUE(store(make(directories(3), 4096), "f", pattern(200'000)));
  const Volume volume = make(directories(3), 16384);
  ASSERT_TRUE(store(volume, "f", pattern(20'000, 2)));
  EXPECT_EQ(fetch(volume, "f"), pattern(20'000, 2));
  ASSERT_TRUE(open(volume, "f", Mode::write));
  EXPECT_EQ(fetch(volume, "f"), pattern(0));
}

TEST_F(VolumeTest, WriteInAnotherOrderOfTheDirectoriesLeavesNothingStale) {
  const auto paths = directories(3);
  ASSERT_TRUE(store(make(paths), "f", pattern(100'000)));
  const Volume turned = make({paths[2], paths[1], paths[0]});
  ASSERT_TRUE(store(turned, "f", pattern(50'000, 2)));
  EXPECT_EQ(fetch(turned, "f"), pattern(50'000, 2));
  EXPECT_EQ(all_files(), (std::vector<std::string>{"d0/f.2", "d0/f.stripe", "d1/f.1", "d1/f.stripe", "d2/f.0",
                                                   "d2/f.stripe"}));
  ASSERT_TRUE(make(paths).remove("f"));
  EXPECT_TRUE(all_files().empty());
}

TEST_F(VolumeTest, CreateRejectsAnyTraceOfAnExistingFile) {
  const Volume volume = make(2);
  auto file = open(volume, "f", Mode::create);
  ASSERT_TRUE(file) << file.error().message;
  auto data = pattern(30'000);
  ASSERT_TRUE(file->pwrite(std::span(data), 0));
  const auto complete = all_files();
  for (const std::string& trace : complete) {
    for (const std::string& other : all_files()) {
      if (other != trace) std::filesystem::remove(root_.file(other));
    }
    const auto again = open(volume, "f", Mode::create);
    ASSERT_FALSE(again) << trace;
    EXPECT_EQ(again.error().code, EEXIST) << again.error().message;
    EXPECT_EQ(all_files(), std::vector{trace}) << "a failed creation changed something";
    std::filesystem::remove(root_.file(trace));
    ASSERT_TRUE(open(volume, "f", Mode::create));
    EXPECT_EQ(all_files(), complete);
  }
}

TEST_F(VolumeTest, ACreationThatFailsAmongTheDescriptorsLeavesNoTrace) {
  const auto paths = directories(3);
  const Volume volume = make(paths);
  for (const Mode mode : {Mode::create, Mode::write}) {
    std::filesystem::rename(paths[2], root_.file("gone"));
    EXPECT_EQ(open(volume, "f", mode).error().code, ENOENT);
    std::filesystem::rename(root_.file("gone"), paths[2]);
    EXPECT_TRUE(all_files().empty());
  }
}

TEST_F(VolumeTest, ACreationThatRunsOutOfFileDescriptorsLeavesNoTrace) {
  if (test::kUnderAddressSanitizer)
    GTEST_SKIP() << "the sanitizers examine memory through a pipe, which needs descriptors";
  const Volume volume = make(5);
  for (const Mode mode : {Mode::create, Mode::write}) {
    // The limits range from no descriptor at all to one that suffices for all but the members, each of which
    // holds up to two.
    std::size_t left = 0;
    for (bool done = false; !done; ++left) {
      auto file = [&] {
        const test::FewDescriptors few(left);
        return open(volume, "f", mode);
      }();
      done = file.has_value();
      if (done) continue;
      EXPECT_EQ(file.error().code, EMFILE) << file.error().message;
      EXPECT_TRUE(all_files().empty()) << left << " descriptors: " << file.error().message;
    }
    EXPECT_GT(left, 5U);
    ASSERT_TRUE(volume.remove("f"));
  }
}

TEST_F(VolumeTest, WriteDoesNotTouchPlainFilesThatLookLikeMembers) {
  const Volume volume = make(2);
  std::ofstream(in(0, "log.0")) << "precious";
  const auto file = open(volume, "log", Mode::write);
  ASSERT_FALSE(file);
  EXPECT_EQ(file.error().code, EEXIST);
  EXPECT_EQ(file.error().path, in(0, "log.0"));
  EXPECT_EQ(volume.remove("log").error().code, ENOENT);
  EXPECT_EQ(std::filesystem::file_size(in(0, "log.0")), 8U);
  EXPECT_EQ(all_files(), std::vector<std::string>{"d0/log.0"});
}

TEST_F(VolumeTest, RemoveRemovesAllOfIt) {
  const Volume volume = make(3);
  ASSERT_TRUE(store(volume, "f", pattern(100'000)));
  ASSERT_TRUE(store(volume, "f.0", pattern(100)));
  ASSERT_TRUE(volume.remove("f"));
  EXPECT_EQ(all_files().size(), 6U) << "files of f.0 only";
  EXPECT_EQ(fetch(volume, "f.0"), pattern(100));
  EXPECT_EQ(volume.remove("f").error().code, ENOENT);
}

TEST_F(VolumeTest, RemoveRemovesLeftovers) {
  const Volume volume = make(3);
  ASSERT_TRUE(store(volume, "f", pattern(100'000)));
  std::filesystem::remove(in(0, "f.0"));
  std::filesystem::remove(in(1, "f.stripe"));
  ASSERT_TRUE(volume.remove("f"));
  EXPECT_TRUE(all_files().empty());
}

TEST_F(VolumeTest, RemovalKeepsTheFirstMemberUntilTheOthersAreGone) {
  const Volume volume = make(3);
  ASSERT_TRUE(store(volume, "f", pattern(100'000)));
  std::filesystem::remove(in(1, "f.1"));
  std::filesystem::create_directory(in(1, "f.1"));  // makes the removal fail
  ASSERT_FALSE(volume.remove("f"));
  EXPECT_TRUE(std::filesystem::exists(in(0, "f.0")));
  EXPECT_FALSE(std::filesystem::exists(in(2, "f.2")));
  std::filesystem::remove(in(1, "f.1"));
  ASSERT_TRUE(volume.remove("f"));
  EXPECT_TRUE(all_files().empty());
}

TEST_F(VolumeTest, ListIsSortedAndCountsEachNameOnce) {
  const Volume volume = make(2);
  EXPECT_EQ(volume.list(), std::vector<std::string>{});
  for (const char* name : {"b", "a.bin", "a"}) ASSERT_TRUE(store(volume, name, pattern(10)));
  std::ofstream(in(0, "plain")) << "x";
  std::ofstream(in(0, ".stripe")) << "x";
  std::filesystem::remove(in(0, "b.stripe"));
  EXPECT_EQ(volume.list(), (std::vector<std::string>{"a", "a.bin", "b"}));
  std::filesystem::remove_all(directories(2)[1]);
  EXPECT_EQ(volume.list().error().code, ENOENT);
}

TEST_F(VolumeTest, OpensOnTheDefaultEngine) {
  const Volume volume = make(2);
  auto data = pattern(40'000);
  {
    auto file = volume.open("f", {.mode = Mode::write});
    ASSERT_TRUE(file) << file.error().message;
    ASSERT_TRUE(file->pwrite(std::span(data), 0));
  }
  EXPECT_EQ(fetch(volume, "f"), data);
}

TEST_F(VolumeTest, RejectsAnEngineWhoseFilesAreInMemory) {
  const Volume volume = make(2);
  const auto engine = Engine::create({.backend = BackendKind::memory});
  ASSERT_TRUE(engine) << engine.error().message;
  EXPECT_EQ(volume.open(*engine, "f", {.mode = Mode::write}).error().kind, ErrorKind::unsupported);
  EXPECT_TRUE(all_files().empty());
}

TEST_F(VolumeTest, RejectedDirectIoKeepsTheOldContents) {
  const std::string root = "/dev/shm";  // files in memory have no direct I/O
  if (::access(root.c_str(), W_OK) != 0) GTEST_SKIP() << "no writable tmpfs at /dev/shm";
  const test::TempDirectory in_memory(root);
  const std::vector<std::string> paths = {in_memory.file("a"), in_memory.file("b")};
  for (const std::string& path : paths) std::filesystem::create_directory(path);
  const Volume volume = make(paths);
  const auto data = pattern(5 * kStripe);
  ASSERT_TRUE(store(volume, "f", data));
  const auto refused = volume.open(engine_, "f", {.mode = Mode::write, .direct = Direct::always});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().kind, ErrorKind::unsupported);
  EXPECT_EQ(fetch(volume, "f"), data);
}

}  // namespace
}  // namespace trunkline
