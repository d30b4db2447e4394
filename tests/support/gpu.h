// A GPU for tests: the fake driver, tests/fake_cuda.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "fake_cuda/fake_cuda.h"
#include "trunkline/device.h"
#include "trunkline/memory.h"

namespace trunkline::test {

// A device of the fake driver.
inline Device& gpu(unsigned ordinal = 0) {
  ::setenv("TRUNKLINE_CUDA_DRIVER", FAKE_CUDA_LIBRARY, 1);  // NOLINT(concurrency-mt-unsafe)
  auto device = cuda_device(ordinal);
  if (!device) ADD_FAILURE() << device.error().message;
  return **device;
}

// Fails the test in which it is created if the driver got a call that no real driver would accept.
struct GpuWatch {
  GpuWatch() {
    gpu();
    fakeCudaReset();
  }
  GpuWatch(const GpuWatch&) = delete;
  GpuWatch& operator=(const GpuWatch&) = delete;
  ~GpuWatch() { EXPECT_STREQ(fakeCudaComplaints(), ""); }
};

// Expects that `count` of them exist (fakeCudaLive). Waits a little, since another thread may drop them a
// moment later.
inline void expect_left(const char* what, std::uint64_t count) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (fakeCudaLive(what) != count && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  EXPECT_EQ(fakeCudaLive(what), count) << what;
}

// The context is current while this object exists, as in a thread that uses torch.
class GpuContext {
 public:
  explicit GpuContext(unsigned ordinal = 0) {
    void* context = nullptr;
    EXPECT_EQ(cuDevicePrimaryCtxRetain(&context, static_cast<int>(ordinal)), 0);
    EXPECT_EQ(cuCtxPushCurrent_v2(context), 0);
  }
  GpuContext(const GpuContext&) = delete;
  GpuContext& operator=(const GpuContext&) = delete;
  ~GpuContext() {
    void* context = nullptr;
    cuCtxPopCurrent_v2(&context);
  }
};

// Device memory.
class GpuMemory {
 public:
  explicit GpuMemory(std::size_t bytes, unsigned ordinal = 0) : bytes_(bytes), ordinal_(ordinal) {
    const GpuContext context(ordinal);
    EXPECT_EQ(cuMemAlloc_v2(&address_, bytes), 0);
  }
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory() {
    const GpuContext context(ordinal_);
    cuMemFree_v2(address_);
  }

  std::uint64_t address() const { return address_; }
  MemoryView view(std::size_t offset, std::size_t bytes, void* stream = nullptr) const {
    return {reinterpret_cast<std::byte*>(address_) + offset, bytes, &gpu(ordinal_), stream};
  }
  MemoryView view(void* stream = nullptr) const { return view(0, bytes_, stream); }
  std::vector<std::byte> contents(std::size_t offset, std::size_t bytes) const {
    std::vector<std::byte> copy(bytes);
    fakeCudaPeek(copy.data(), address_ + offset, bytes);
    return copy;
  }
  std::vector<std::byte> contents() const { return contents(0, bytes_); }
  void set(const std::vector<std::byte>& bytes) const { fakeCudaPoke(address_, bytes.data(), bytes.size()); }

 private:
  std::uint64_t address_ = 0;
  std::size_t bytes_;
  unsigned ordinal_;
};

class GpuStream {
 public:
  explicit GpuStream(unsigned ordinal = 0) : ordinal_(ordinal) {
    const GpuContext context(ordinal);
    EXPECT_EQ(cuStreamCreate(&handle_, 1), 0);
  }
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;
  ~GpuStream() { cuStreamDestroy_v2(handle_); }
  void* handle() const { return handle_; }
  int synchronize() const {
    const GpuContext context(ordinal_);
    return cuStreamSynchronize(handle_);
  }

 private:
  void* handle_ = nullptr;
  unsigned ordinal_;
};

}  // namespace trunkline::test
