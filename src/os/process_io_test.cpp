#include "os/process_io.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <vector>

#include "os/unique_fd.h"

namespace trunkline::os {
namespace {

TEST(ProcessIo, CountsReads) {
  const UniqueFd zeros(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
  std::vector<std::byte> bytes(1 << 20);
  const auto before = bytes_read_by_calls();
  ASSERT_TRUE(before);
  ASSERT_EQ(::read(zeros.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  const auto after = bytes_read_by_calls();
  ASSERT_TRUE(after);
  EXPECT_GE(*after - *before, bytes.size());
  const auto again = bytes_read_by_calls();
  EXPECT_LT(*again - *after, bytes.size());  // the query itself reads a little
}

}  // namespace
}  // namespace trunkline::os
