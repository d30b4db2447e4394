// What opening reports for striped files that are incomplete or inconsistent.
#include <cerrno>
#include <fstream>
#include <iterator>

#include "support/test_memory.h"
#include "volume/volume_fixture.h"

namespace trunkline {
namespace {

class CorruptVolumeTest : public test::VolumeTest {
 protected:
  void SetUp() override {
    VolumeTest::SetUp();
    data_.resize(100'000);
    test::fill_random(data_, 3);
    paths_ = directories(3);
    ASSERT_TRUE(store(make(paths_), "f", data_));
  }

  void expect_refused(const Volume& volume, ErrorKind kind, const std::string& path,
                      std::string_view says) const {
    for (const Mode mode : {Mode::read, Mode::read_write}) {
      const auto file = open(volume, "f", mode);
      ASSERT_FALSE(file);
      EXPECT_EQ(file.error().kind, kind) << file.error().message;
      EXPECT_EQ(file.error().path, path);
      EXPECT_NE(file.error().message.find(path), std::string::npos) << file.error().message;
      EXPECT_NE(file.error().message.find(says), std::string::npos) << file.error().message;
    }
  }

  static void replace_in(const std::string& path, const std::string& from, const std::string& to) {
    std::string text{std::istreambuf_iterator<char>(std::ifstream(path).rdbuf()), {}};
    ASSERT_NE(text.find(from), std::string::npos);
    std::ofstream(path) << text.replace(text.find(from), from.size(), to);
  }

  std::vector<std::string> paths_;
  std::vector<std::byte> data_;
};

TEST_F(CorruptVolumeTest, AMissingFileIsNotFound) {
  for (const Mode mode : {Mode::read, Mode::read_write}) {
    const auto file = open(make(paths_), "g", mode);
    ASSERT_FALSE(file);
    EXPECT_EQ(file.error().kind, ErrorKind::system);
    EXPECT_EQ(file.error().code, ENOENT);
    EXPECT_NE(file.error().message.find("/g"), std::string::npos);
  }
}

TEST_F(CorruptVolumeTest, AMissingDescriptor) {
  for (std::size_t i = 0; i < 3; ++i) {
    const std::string name = in(i, "f.stripe");
    std::filesystem::rename(name, name + ".away");
    expect_refused(make(paths_), ErrorKind::corrupt, name, "is missing");
    std::filesystem::rename(name + ".away", name);
  }
  EXPECT_EQ(fetch(make(paths_), "f"), data_);
}

TEST_F(CorruptVolumeTest, AMissingMember) {
  for (std::size_t i = 0; i < 3; ++i) {
    const std::string name = in(i, fmt::format("f.{}", i));
    std::filesystem::rename(name, name + ".away");
    expect_refused(make(paths_), ErrorKind::corrupt, name, "is missing");
    std::filesystem::create_directory(name);
    expect_refused(make(paths_), ErrorKind::corrupt, name, "not a regular file");
    std::filesystem::remove(name);
    std::filesystem::rename(name + ".away", name);
  }
}

TEST_F(CorruptVolumeTest, AMemberOfAnotherSize) {
  const std::string name = in(1, "f.1");
  const auto bytes = std::filesystem::file_size(name);
  for (const auto wrong : {bytes - 1, bytes + 1, std::uintmax_t{0}, bytes + 100 * kStripe}) {
    std::filesystem::resize_file(name, wrong);
    const auto file = open(make(paths_), "f", Mode::read);
    ASSERT_FALSE(file) << wrong;
    EXPECT_EQ(file.error().kind, ErrorKind::corrupt) << file.error().message;
  }
}

TEST_F(CorruptVolumeTest, AnInvalidDescriptor) {
  const std::string name = in(2, "f.stripe");
  std::ofstream(name) << "";
  expect_refused(make(paths_), ErrorKind::format, name, "flat JSON object");
  std::ofstream(name) << std::string(1 << 20, ' ');
  expect_refused(make(paths_), ErrorKind::format, name, "longer than");
}

TEST_F(CorruptVolumeTest, ADescriptorOfANewerVersion) {
  replace_in(in(0, "f.stripe"), "\"version\": 1", "\"version\": 2");
  expect_refused(make(paths_), ErrorKind::format, in(0, "f.stripe"), "upgrade");
}

TEST_F(CorruptVolumeTest, ADescriptorOfAnotherFile) {
  ASSERT_TRUE(store(make(paths_), "g", data_));
  std::filesystem::copy_file(in(1, "g.stripe"), in(1, "f.stripe"),
                             std::filesystem::copy_options::overwrite_existing);
  expect_refused(make(paths_), ErrorKind::corrupt, in(1, "f.stripe"), "belongs to a different file");
}

TEST_F(CorruptVolumeTest, DirectoriesInAnotherOrder) {
  const Volume turned = make({paths_[1], paths_[0], paths_[2]});
  expect_refused(turned, ErrorKind::corrupt, in(1, "f.stripe"), "in the order");
}

TEST_F(CorruptVolumeTest, AnotherNumberOfDirectories) {
  expect_refused(make({paths_[0], paths_[1]}), ErrorKind::corrupt, in(0, "f.stripe"), "over 3 directories");
  const auto four = directories(4);
  expect_refused(make(four), ErrorKind::corrupt, in(0, "f.stripe"), "over 3 directories");
}

TEST_F(CorruptVolumeTest, DescriptorsWithDifferentStripeUnits) {
  replace_in(in(2, "f.stripe"), "8192", "4096");
  expect_refused(make(paths_), ErrorKind::corrupt, in(2, "f.stripe"), "stripe unit");
}

TEST_F(CorruptVolumeTest, AnInterruptedOverwriteIsDetectedAndCanBeRewritten) {
  // The state after a crash between the first descriptor and the second.
  std::filesystem::copy_file(in(1, "f.stripe"), in(1, "old"));
  std::filesystem::copy_file(in(2, "f.stripe"), in(2, "old"));
  ASSERT_TRUE(open(make(paths_), "f", Mode::write));
  std::filesystem::rename(in(1, "old"), in(1, "f.stripe"));
  std::filesystem::rename(in(2, "old"), in(2, "f.stripe"));
  expect_refused(make(paths_), ErrorKind::corrupt, in(1, "f.stripe"), "interrupted overwrite");
  ASSERT_TRUE(store(make(paths_), "f", data_));
  EXPECT_EQ(fetch(make(paths_), "f"), data_);
}

TEST_F(CorruptVolumeTest, ABrokenFileCanBeRewritten) {
  std::ofstream(in(0, "f.stripe")) << "garbage";
  std::filesystem::remove(in(1, "f.stripe"));
  std::filesystem::remove(in(2, "f.2"));
  ASSERT_TRUE(store(make(paths_), "f", data_));
  EXPECT_EQ(fetch(make(paths_), "f"), data_);
}

}  // namespace
}  // namespace trunkline
