#include "os/file_type.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

namespace fs = std::filesystem;

struct Answers {
  bool exists;
  bool is_directory;
  bool is_symlink;
  bool operator==(const Answers&) const = default;
};

Answers answers_for(const std::string& path) { return {exists(path), is_directory(path), is_symlink(path)}; }

TEST(FileType, ALinkExistsItselfAndIsADirectoryByItsTarget) {
  const test::TempDirectory root;
  const auto expect = [&](const std::string& name, const Answers& expected) {
    EXPECT_EQ(answers_for(root.file(name)), expected) << name;
  };
  fs::create_directory(root.file("directory"));
  std::ofstream(root.file("file")) << "x";
  fs::create_directory_symlink(root.file("directory"), root.file("link"));
  fs::create_symlink(root.file("file"), root.file("file_link"));
  fs::create_symlink(root.file("nothing"), root.file("dangling"));
  expect("directory", {.exists = true, .is_directory = true, .is_symlink = false});
  expect("file", {.exists = true, .is_directory = false, .is_symlink = false});
  expect("link", {.exists = true, .is_directory = true, .is_symlink = true});
  expect("file_link", {.exists = true, .is_directory = false, .is_symlink = true});
  expect("dangling", {.exists = true, .is_directory = false, .is_symlink = true});
  expect("nothing", {.exists = false, .is_directory = false, .is_symlink = false});
  expect("file/below", {.exists = false, .is_directory = false, .is_symlink = false});
}

}  // namespace
}  // namespace trunkline::os
