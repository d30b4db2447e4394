#include "base/creation_error.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace trunkline {
namespace {

TEST(CreationError, NamesTheMissingDirectory) {
  const Error error = creation_error(ENOENT, "create /a/b/c", "/a/b/c", "/a/b");
  EXPECT_EQ(error.message,
            "cannot create /a/b/c: no such file or directory (ENOENT); a parent directory does not exist: "
            "create it "
            "(mkdir -p /a/b)");
  EXPECT_EQ(error.code, ENOENT);
  EXPECT_EQ(error.path, "/a/b/c");
  EXPECT_EQ(error.kind, ErrorKind::system);
}

TEST(CreationError, DoesNotSayToCreateWhatExists) {
  const std::string message = creation_error(ENOENT, "create /proc/x", "/proc/x", "/proc").message;
  EXPECT_EQ(message.find("mkdir"), std::string::npos) << message;
  EXPECT_NE(message.find("/proc exists"), std::string::npos) << message;
}

TEST(MissingDirectoryError, SaysHowToCreateIt) {
  const Error error = missing_directory_error(ENOENT, "measure /a/b", "/a/b");
  EXPECT_EQ(error.message,
            "cannot measure /a/b: no such file or directory (ENOENT); check the path, or create it (mkdir -p "
            "/a/b)");
  EXPECT_EQ(error.path, "/a/b");
  EXPECT_EQ(missing_directory_error(EACCES, "measure /a", "/a").message,
            system_error(EACCES, "measure /a", "/a").message);
}

TEST(CreationError, IsASystemErrorOtherwise) {
  EXPECT_EQ(creation_error(ENOSPC, "create /a", "/a", "/").message,
            system_error(ENOSPC, "create /a", "/a").message);
}

}  // namespace
}  // namespace trunkline
