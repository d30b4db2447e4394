#include <gtest/gtest.h>

#include <cstdlib>

#include "device/cuda/api.h"
#include "support/gpu.h"

namespace trunkline {
namespace {

TEST(CudaTest, AMachineWithoutTheDriverIsToldWhatIsMissing) {
  const auto loaded = cuda::load_driver("/no/such/libcuda.so.1");
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.error().kind, ErrorKind::unsupported);
  EXPECT_EQ(loaded.error().message,
            "no NVIDIA driver is installed here (/no/such/libcuda.so.1 was not found)");
}

TEST(CudaTest, ALibraryThatIsNoDriverIsNamedWithWhatItLacks) {
  const auto loaded = cuda::load_driver("libc.so.6");
  ASSERT_FALSE(loaded);
  EXPECT_NE(loaded.error().message.find("cuInit"), std::string::npos) << loaded.error().message;
}

TEST(CudaTest, ADriverThatCannotBeInitialisedSaysWhy) {
  fakeCudaFail("cuInit", 100, 0, 1);
  const auto loaded = cuda::load_driver(FAKE_CUDA_LIBRARY);
  fakeCudaReset();
  ASSERT_FALSE(loaded);
  EXPECT_NE(loaded.error().message.find("cuInit"), std::string::npos) << loaded.error().message;
}

TEST(CudaTest, InfoDescribesEachDevice) {
  test::gpu();
  const auto info = cuda_info();
  ASSERT_TRUE(info) << info.error().message;
  EXPECT_EQ(info->version, 12040);
  EXPECT_EQ(info->library, FAKE_CUDA_LIBRARY);
  ASSERT_EQ(info->devices.size(), 2U);
  EXPECT_EQ(info->devices[0].name, "Stand-in GPU");
  EXPECT_EQ(info->devices[0].pci, "0000:17:00.0");
  EXPECT_EQ(info->devices[0].compute_capability, 90);
  EXPECT_TRUE(info->devices[0].direct_rdma);
  EXPECT_EQ(info->devices[1].ordinal, 1U);
  EXPECT_EQ(info->devices[1].pci, "0000:18:00.0");
}

}  // namespace
}  // namespace trunkline
