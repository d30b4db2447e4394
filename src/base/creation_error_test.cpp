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

TEST(CreationError, IsASystemErrorOtherwise) {
  EXPECT_EQ(creation_error(ENOSPC, "create /a", "/a", "/").message,
            system_error(ENOSPC, "create /a", "/a").message);
}

}  // namespace
}  // namespace trunkline
