#include "records/open_files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "records/file_stamp.h"
#include "support/temp_directory.h"

namespace trunkline::records {
namespace {

namespace fs = std::filesystem;

void write(const std::string& path, std::string_view contents) { std::ofstream(path) << contents; }

// Files of some bytes, and their table.
class Files {
 public:
  explicit Files(std::size_t count) : firsts_(count + 1) {
    std::iota(firsts_.begin(), firsts_.end(), std::uint64_t{0});
    for (std::size_t index = 0; index < count; ++index) {
      paths_.push_back(directory_.file(std::to_string(index)));
      write(paths_.back(), "contents");
      blob_ += paths_.back();
      ends_.push_back(blob_.size());
      struct stat status{};
      EXPECT_EQ(::stat(paths_.back().c_str(), &status), 0);
      sizes_.push_back(static_cast<std::uint64_t>(status.st_size));
      mtimes_.push_back(std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec);
      inodes_.push_back(status.st_ino);
    }
  }

  std::shared_ptr<const SampleTable> table() const {
    SampleTable table;
    table.path_blob = blob_;
    table.path_ends = ends_;
    table.first_samples = firsts_;
    table.sizes = sizes_;
    table.mtimes_ns = mtimes_;
    table.inodes = inodes_;
    table.record_bytes = table.stride_bytes = 8;
    return std::make_shared<const SampleTable>(table);
  }
  const std::string& path(std::size_t file) const { return paths_[file]; }

 private:
  const test::TempDirectory directory_;
  std::vector<std::string> paths_;
  std::string blob_;
  std::vector<std::uint64_t> ends_, firsts_, sizes_, inodes_;
  std::vector<std::int64_t> mtimes_;
};

OpenFiles open_files(const Files& files) { return {*Engine::create(), files.table(), std::nullopt}; }

void expect_changed(const Result<File>& opened, std::string_view what) {
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().kind, ErrorKind::corrupt);
  EXPECT_NE(opened.error().message.find(what), std::string::npos) << opened.error().message;
}

TEST(OpenFiles, OpensAFileOnce) {
  const Files files(2);
  OpenFiles open = open_files(files);
  const auto first = open.open(0);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->path(), files.path(0));
  fs::remove(files.path(0));  // it is open
  EXPECT_TRUE(open.open(0));
  EXPECT_TRUE(open.open(1));
}

TEST(OpenFiles, RejectsFilesThatWereChangedBeforeOpening) {
  const Files files(3);
  OpenFiles open = open_files(files);
  write(files.path(0), "contents and more");
  expect_changed(open.open(0), "it has 17 bytes, and had 8");
  const auto time = fs::last_write_time(files.path(1));
  fs::last_write_time(files.path(1), time + std::chrono::seconds(1));
  expect_changed(open.open(1), "it was modified");
  const auto other_time = fs::last_write_time(files.path(2));
  write(files.path(2) + ".new", "CONTENTS");
  fs::rename(files.path(2) + ".new", files.path(2));
  fs::last_write_time(files.path(2), other_time);
  expect_changed(open.open(2), "it was replaced");
}

TEST(OpenFiles, NoticesChangesOfOpenFiles) {
  const Files files(1);
  OpenFiles open = open_files(files);
  const auto opened = open.open(0);
  ASSERT_TRUE(opened);
  EXPECT_TRUE(open.check_unchanged(*opened, 0));
  fs::resize_file(files.path(0), 3);
  const auto status = open.check_unchanged(*opened, 0);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().kind, ErrorKind::corrupt);
}

TEST(OpenFiles, ClosesTheFileThatWasUsedLeastRecently) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{.rlim_cur = 8 * 5, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const Files files(6);
  OpenFiles open = open_files(files);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_EQ(open.capacity(), 5U);
  for (std::uint32_t file = 0; file < 5; ++file) ASSERT_TRUE(open.open(file));
  ASSERT_TRUE(open.open(0));
  ASSERT_TRUE(open.open(5));  // in the place of 1
  for (std::size_t file = 0; file < 6; ++file) fs::remove(files.path(file));
  for (const std::uint32_t file : {0U, 2U, 3U, 4U, 5U}) EXPECT_TRUE(open.open(file)) << file;
  EXPECT_FALSE(open.open(1));
}

TEST(OpenFiles, OpensManyAheadAndKeepsTheErrorOfEach) {
  const Files files(40);
  OpenFiles open = open_files(files);
  fs::remove(files.path(7));
  write(files.path(9), "longer contents");
  std::vector<std::uint32_t> wanted(40);
  std::iota(wanted.begin(), wanted.end(), 0U);
  wanted.push_back(3);  // twice
  open.open_ahead(wanted);
  for (std::size_t file = 0; file < 40; ++file) fs::remove(files.path(file));
  for (std::uint32_t file = 0; file < 40; ++file) {
    const auto opened = open.open(file);
    EXPECT_EQ(opened.has_value(), file != 7 && file != 9) << file;
  }
  EXPECT_EQ(open.open(7).error().code, ENOENT);
  expect_changed(open.open(9), "it has 15 bytes");
}

TEST(FileStamp, IsOfTheFileAsItIsNow) {
  const Files files(1);
  const auto file = File::open(*Engine::create(), files.path(0));
  ASSERT_TRUE(file);
  const auto before = stamp_of(*file);
  ASSERT_TRUE(before);
  EXPECT_EQ(before->bytes, 8U);
  std::ofstream(files.path(0), std::ios::app) << " and more";
  const auto after = stamp_of(*file);
  EXPECT_EQ(after->bytes, 17U);
  EXPECT_EQ(after->inode, before->inode);
  EXPECT_GE(after->mtime_ns, before->mtime_ns);
}

TEST(FileStamp, OfAVolumeChangesWithEachPart) {
  const test::TempDirectory one;
  const test::TempDirectory two;
  const Engine engine = *Engine::create();
  const Volume volume = *Volume::create({one.path(), two.path()});
  {
    const auto file = volume.open(engine, "data", {.mode = Mode::write});
    ASSERT_TRUE(file);
    std::vector<std::byte> bytes(8 << 20);
    ASSERT_TRUE(file->pwrite(std::span(bytes), 0));
    ASSERT_TRUE(file->sync());
  }
  const auto stamp = [&] { return *stamp_of(*volume.open(engine, "data")); };
  const FileStamp before = stamp();
  EXPECT_EQ(before.bytes, std::uint64_t{8} << 20);
  EXPECT_GT(before.inode, 0U);
  for (const auto& part : fs::directory_iterator(two.path()))
    fs::last_write_time(part, fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_GT(stamp().mtime_ns, before.mtime_ns);
}

TEST(FileStamp, IsEmptyInMemory) {
  const Engine engine = *Engine::create({.backend = BackendKind::memory});
  const auto file = File::open(engine, "name", {.mode = Mode::write});
  ASSERT_TRUE(file);
  const auto stamp = stamp_of(*file);
  ASSERT_TRUE(stamp);
  EXPECT_EQ(stamp->inode, 0U);
  EXPECT_EQ(stamp->mtime_ns, 0);
}

}  // namespace
}  // namespace trunkline::records
