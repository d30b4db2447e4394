#include "os/same_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include "os/unique_fd.h"
#include "support/temp_directory.h"

namespace trunkline::os {
namespace {

namespace fs = std::filesystem;

TEST(SameFile, AReplacedDirectoryIsNotTheSame) {
  const test::TempDirectory root;
  const std::string path = root.file("run");
  fs::create_directory(path);
  const UniqueFd fd(::open(path.c_str(), O_PATH | O_CLOEXEC));
  EXPECT_TRUE(check_leads_to(path, fd.get()));
  fs::rename(path, root.file("moved"));
  EXPECT_EQ(check_leads_to(path, fd.get()).error().code, ENOENT);
  fs::create_directory_symlink(root.file("moved"), path);
  EXPECT_TRUE(check_leads_to(path, fd.get())) << "through a link";
  fs::remove(path);
  fs::create_directory(path);
  const Status other = check_leads_to(path, fd.get());
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, ESTALE);
  EXPECT_EQ(other.error().path, path);
}

}  // namespace
}  // namespace trunkline::os
