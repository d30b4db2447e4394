#include "trunkline/error.h"

#include <gtest/gtest.h>

#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>

namespace trunkline {
namespace {

TEST(ErrnoName, NamesKnownNumbersAndPrintsOthers) {
  EXPECT_EQ(errno_name(EIO), "EIO");
  EXPECT_EQ(errno_name(ENOSPC), "ENOSPC");
  EXPECT_EQ(errno_name(EAGAIN), "EAGAIN");
  EXPECT_EQ(errno_name(4711), "errno 4711");
  EXPECT_EQ(errno_name(0), "errno 0");
  EXPECT_EQ(errno_name(-5), "errno -5");
}

TEST(SystemError, SaysWhatWasDoneTheCauseAndWhatToTry) {
  const Error error = system_error(ENOSPC, "write 4096 bytes at 0 of /data/a.bin", "/data/a.bin");
  EXPECT_EQ(error.kind, ErrorKind::system);
  EXPECT_EQ(error.code, ENOSPC);
  EXPECT_EQ(error.path, "/data/a.bin");
  EXPECT_TRUE(
      error.message.starts_with("cannot write 4096 bytes at 0 of /data/a.bin: no space left on device "
                                "(ENOSPC); the filesystem is full"))
      << error.message;
}

TEST(SystemError, CommonFileErrorsSayWhatToTry) {
  for (const int code : {ENOSPC, EDQUOT, EIO, EBADF, EINVAL, EACCES, EPERM, EROFS, ENOENT, EEXIST, EMFILE,
                         ENOMEM, EFBIG, EISDIR, ENOTDIR, ENAMETOOLONG}) {
    EXPECT_NE(system_error(code, "x").message.find("); "), std::string::npos) << errno_name(code);
  }
}

TEST(SystemError, SaysWhereARelativePathIsLookedUp) {
  const std::string current = std::filesystem::current_path().string();
  EXPECT_EQ(
      system_error(ENOENT, "open x.pt", "x.pt").message,
      "cannot open x.pt: no such file or directory (ENOENT); check the path (the current directory is " +
          current + ")");
  EXPECT_EQ(system_error(ENOENT, "open /x.pt", "/x.pt").message.find(current + ")"), std::string::npos);
}

TEST(SystemError, SaysTheCauseOnce) {
  const auto lower = [](std::string text) {
    for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return text;
  };
  for (int code = 1; code < 134; ++code) {
    const char* const description = ::strerrordesc_np(code);
    if (description == nullptr) continue;
    const std::string message = lower(system_error(code, "x").message);
    const std::string cause = lower(description);
    const std::size_t first = message.find(cause);
    ASSERT_NE(first, std::string::npos) << message;
    EXPECT_EQ(message.find(cause, first + 1), std::string::npos) << message;
  }
}

TEST(SystemError, AnUnnamedErrnoIsPrintedAsANumber) {
  EXPECT_EQ(system_error(4711, "open x").message, "cannot open x: errno 4711");
}

TEST(MakeError, CarriesTheErrnoThatFitsTheKind) {
  EXPECT_EQ(make_error(ErrorKind::invalid_argument, "m").code, EINVAL);
  EXPECT_EQ(make_error(ErrorKind::out_of_budget, "m").code, ENOMEM);
  EXPECT_EQ(make_error(ErrorKind::closed, "m").code, EBADF);
  const Error corrupt = make_error(ErrorKind::corrupt, "member is missing", "/a");
  EXPECT_EQ(corrupt.code, 0);
  EXPECT_EQ(corrupt.message, "member is missing");
  EXPECT_EQ(corrupt.path, "/a");
}

TEST(ErrorKindName, IsTheNameOfTheEnumerator) {
  EXPECT_EQ(to_string(ErrorKind::end_of_file), "end_of_file");
  EXPECT_EQ(to_string(ErrorKind::out_of_budget), "out_of_budget");
}

}  // namespace
}  // namespace trunkline
