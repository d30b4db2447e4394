// GPU memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/error.h"
#include "trunkline/memory.h"

namespace trunkline {

// A GPU of this machine, as the driver describes it.
struct CudaDeviceInfo {
  unsigned ordinal = 0;
  std::string name;  // of the model
  std::string pci;   // "0000:17:00.0"
  std::uint64_t memory_bytes = 0;
  int compute_capability = 0;  // major * 10 + minor
  bool direct_rdma = false;    // other devices' DMA can reach its memory
};

// The CUDA driver of this machine. Where there is none, cuda_info() fails with `unsupported` and says why.
struct CudaInfo {
  int version = 0;  // 12040: 12.4
  std::string library;
  std::vector<CudaDeviceInfo> devices;
};
Result<CudaInfo> cuda_info();

// The memory of a GPU, for MemoryView::device. Its primary context is retained until the process ends. Fails
// with `unsupported` where there is no driver or no such GPU. Thread-safe. Like CUDA itself, it fails in a
// forked child of a process that has used CUDA.
Result<Device*> cuda_device(unsigned ordinal);

// The GPU whose memory holds an address. Fails like cuda_device(); invalid_argument for memory that is not a
// GPU's.
Result<unsigned> cuda_device_of(const void* address);

// The first GPU that this process already uses, through Trunkline or torch. Never loads a driver or creates a
// context to find out.
std::optional<unsigned> cuda_device_in_use();

class PinnedBudget;

// Registers host memory with the CUDA driver, so that copies between it and any GPU are asynchronous and
// fast. The registration lasts until the returned handle is dropped, which must happen before the memory is
// freed. A range that lies within memory registered by this function shares that registration, which then
// lasts until both handles are dropped. A range that only partly overlaps one is rejected (`device`): the
// driver does not register a page twice, and a copy must not span two registrations. `ordinal`: the GPU whose
// context is used; nullopt: the GPU in use, else the first one. `budget`: a newly registered range counts
// against it until it is released; a shared one is not counted again. Fails with `unsupported` as
// cuda_device() does, `out_of_budget` where it does not fit, `device` where the driver refuses. Thread-safe.
Result<std::shared_ptr<const void>> register_host_memory(std::span<std::byte> memory,
                                                         std::optional<unsigned> ordinal = std::nullopt,
                                                         std::shared_ptr<PinnedBudget> budget = nullptr);

// "cpu", "cuda:0".
std::string_view name_of(const Device& device);

}  // namespace trunkline
