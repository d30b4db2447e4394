// Files striped over directories of which a volume has some: it neither overwrites nor removes parts of them.
#include <fstream>

#include "support/test_memory.h"
#include "volume/volume_fixture.h"

namespace trunkline {
namespace {

class VolumeOverlapTest : public test::VolumeTest {
 protected:
  static std::vector<std::byte> bytes(std::size_t count, unsigned seed = 1) {
    std::vector<std::byte> data(count);
    test::fill_random(data, seed);
    return data;
  }

  std::vector<std::string> at(std::initializer_list<std::size_t> places) const {
    const auto all = directories(5);
    std::vector<std::string> paths;
    for (const std::size_t place : places) paths.push_back(all[place]);
    return paths;
  }

  void expect_refused(const Volume& volume, const std::string& descriptor,
                      ErrorKind kind = ErrorKind::corrupt) const {
    const auto before = all_files();
    const auto file = open(volume, "f", Mode::write);
    ASSERT_FALSE(file);
    const auto removed = volume.remove("f");
    ASSERT_FALSE(removed);
    for (const Error& error : {file.error(), removed.error()}) {
      EXPECT_EQ(error.kind, kind) << error.message;
      EXPECT_EQ(error.path, descriptor) << error.message;
      EXPECT_NE(error.message.find(descriptor), std::string::npos) << error.message;
    }
    EXPECT_EQ(all_files(), before);
  }
};

TEST_F(VolumeOverlapTest, AnotherNumberOfDirectories) {
  const auto data = bytes(100'000);
  ASSERT_TRUE(store(make(at({0, 1, 2})), "f", data));
  expect_refused(make(at({0, 1})), in(0, "f.stripe"));
  expect_refused(make(at({2, 1})), in(2, "f.stripe"));
  expect_refused(make(at({1})), in(1, "f.stripe"));
  expect_refused(make(at({0, 1, 2, 3})), in(0, "f.stripe"));
  expect_refused(make(at({3, 4, 0, 1})), in(0, "f.stripe"));
  EXPECT_EQ(fetch(make(at({0, 1, 2})), "f"), data);
}

TEST_F(VolumeOverlapTest, TheSameNumberOfOtherDirectories) {
  // Also where the members that are here have no data: a small file is in its first member only.
  for (const std::size_t size : {std::size_t{100'000}, std::size_t{100}}) {
    const auto data = bytes(size);
    ASSERT_TRUE(store(make(at({0, 1})), "f", data));
    expect_refused(make(at({0, 2})), in(0, "f.stripe"));
    expect_refused(make(at({2, 0})), in(0, "f.stripe"));
    expect_refused(make(at({2, 1})), in(1, "f.stripe"));
    expect_refused(make(at({1, 2})), in(1, "f.stripe"));
    EXPECT_EQ(fetch(make(at({0, 1})), "f"), data);
  }
}

TEST_F(VolumeOverlapTest, PartsOfTwoFiles) {
  const auto first = bytes(100'000);
  const auto second = bytes(100'000, 2);
  ASSERT_TRUE(store(make(at({0, 1})), "f", first));
  ASSERT_TRUE(store(make(at({2, 3})), "f", second));
  expect_refused(make(at({0, 3})), in(0, "f.stripe"));
  expect_refused(make(at({3, 0})), in(3, "f.stripe"));
  EXPECT_EQ(fetch(make(at({0, 1})), "f"), first);
  EXPECT_EQ(fetch(make(at({2, 3})), "f"), second);
}

TEST_F(VolumeOverlapTest, TheMessageSaysWhichDirectoriesAndWhatToDo) {
  ASSERT_TRUE(store(make(at({0, 1})), "f", bytes(100'000)));
  const std::string message = open(make(at({0, 2})), "f", Mode::write).error().message;
  EXPECT_NE(message.find("cannot overwrite striped file " + in(0, "f") + " in the directories " + at({0})[0] +
                         ", " + at({2})[0]),
            std::string::npos)
      << message;
  EXPECT_NE(message.find("Use another name, or remove that file with a volume of its own directories"),
            std::string::npos)
      << message;
}

TEST_F(VolumeOverlapTest, ADescriptorOfANewerVersion) {
  ASSERT_TRUE(store(make(at({0, 1})), "f", bytes(100'000)));
  std::ofstream(in(1, "f.stripe")) << R"({"format": "trunkline-stripe", "version": 2, "parts": 7})";
  expect_refused(make(at({0, 1})), in(1, "f.stripe"), ErrorKind::format);
}

TEST_F(VolumeOverlapTest, WhatAnInterruptionLeavesCanBeOverwrittenAndRemoved) {
  const Volume volume = make(at({0, 1, 2}));
  for (const bool remove : {false, true}) {
    const auto finish = [&] {
      if (remove) {
        EXPECT_TRUE(volume.remove("f"));
        EXPECT_TRUE(all_files().empty());
      } else {
        const auto data = bytes(50'000, 3);
        ASSERT_TRUE(store(volume, "f", data));
        EXPECT_EQ(fetch(volume, "f"), data);
        ASSERT_TRUE(volume.remove("f"));
      }
    };
    // A creation, among its descriptors.
    ASSERT_TRUE(store(volume, "f", {}));
    for (std::size_t i = 0; i < 3; ++i) std::filesystem::remove(in(i, fmt::format("f.{}", i)));
    std::filesystem::remove(in(2, "f.stripe"));
    finish();
    // A removal, among its members.
    ASSERT_TRUE(store(volume, "f", bytes(100'000)));
    std::filesystem::remove(in(2, "f.2"));
    finish();
    // An overwriting in another order of the directories, among its descriptors.
    ASSERT_TRUE(store(make(at({2, 1, 0})), "f", bytes(100'000)));
    std::filesystem::copy_file(in(1, "f.stripe"), in(1, "old"));
    std::filesystem::copy_file(in(2, "f.stripe"), in(2, "old"));
    ASSERT_TRUE(open(volume, "f", Mode::write));
    std::filesystem::rename(in(1, "old"), in(1, "f.stripe"));
    std::filesystem::rename(in(2, "old"), in(2, "f.stripe"));
    std::filesystem::remove(in(2, "f.2"));
    finish();
  }
}

}  // namespace
}  // namespace trunkline
