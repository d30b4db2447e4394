#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <span>
#include <thread>
#include <vector>

#include "support/gpu.h"

namespace trunkline {
namespace {

class HostMemoryTest : public testing::Test {
 protected:
  HostMemoryTest() {
    test::gpu();
    fakeCudaReset();
  }
  ~HostMemoryTest() override { EXPECT_STREQ(fakeCudaComplaints(), ""); }

  std::span<std::byte> part(std::size_t offset, std::size_t bytes) {
    return std::span(memory_).subspan(offset, bytes);
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(65536);
};

TEST_F(HostMemoryTest, IsRegisteredUntilItsHoldersLetGo) {
  auto first = register_host_memory(part(0, 8192));
  ASSERT_TRUE(first) << first.error().message;
  EXPECT_EQ(fakeCudaLive("registrations"), 1U);
  auto within = register_host_memory(part(4096, 4096), 1);
  ASSERT_TRUE(within);
  EXPECT_EQ(fakeCudaLive("registrations"), 1U);
  auto beside = register_host_memory(part(8192, 1));
  ASSERT_TRUE(beside);
  EXPECT_EQ(fakeCudaLive("registrations"), 2U);
  beside->reset();
  first->reset();
  EXPECT_EQ(fakeCudaLive("registrations"), 1U);
  within->reset();
  EXPECT_EQ(fakeCudaLive("registrations"), 0U);
}

TEST_F(HostMemoryTest, WhatTheDriverRefusesIsAnErrorAndHoldsNothing) {
  const auto first = register_host_memory(part(4096, 4096));
  ASSERT_TRUE(first);
  const auto overlapping = register_host_memory(part(0, 8192));
  ASSERT_FALSE(overlapping);
  EXPECT_EQ(overlapping.error().kind, ErrorKind::device);
  EXPECT_NE(overlapping.error().message.find("ALREADY_REGISTERED"), std::string::npos)
      << overlapping.error().message;
  for (const char* function : {"cuMemHostRegister_v2", "cuCtxPushCurrent_v2"}) {
    fakeCudaFail(function, 2, 0, 1);
    EXPECT_FALSE(register_host_memory(part(20000, 1))) << function;
    EXPECT_TRUE(register_host_memory(part(20000, 1))) << function;
  }
  EXPECT_EQ(fakeCudaLive("registrations"), 1U);
  EXPECT_EQ(register_host_memory(part(0, 1), 7).error().kind, ErrorKind::unsupported);
  EXPECT_TRUE(register_host_memory({}));
}

TEST_F(HostMemoryTest, ManyThreadsShareOne) {
  std::vector<std::thread> threads;
  std::atomic<unsigned> refused{0};
  for (int index = 0; index < 4; ++index) {
    threads.emplace_back([&] {
      for (int round = 0; round < 500; ++round) {
        if (!register_host_memory(part(0, 4096))) ++refused;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused, 0U);
  EXPECT_EQ(fakeCudaLive("registrations"), 0U);
}

TEST_F(HostMemoryTest, TheDeviceInUseIsTheFirstWithAContext) {
  ASSERT_TRUE(cuda_device_in_use());  // by the fixture
  EXPECT_EQ(*cuda_device_in_use(), 0U);
  fakeCudaFail("cuDevicePrimaryCtxGetState", 1, 0, 1);
  EXPECT_NE(cuda_device_in_use(), 0U);
}

}  // namespace
}  // namespace trunkline
