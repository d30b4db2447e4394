// Memory of GPUs.
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

// The CUDA driver of this machine. cuda_info() fails with `unsupported`, and says why, where there is none.
struct CudaInfo {
  int version = 0;  // 12040: 12.4
  std::string library;
  std::vector<CudaDeviceInfo> devices;
};
Result<CudaInfo> cuda_info();

// The memory of a GPU, for MemoryView::device. Its primary context is kept until the process ends.
// `unsupported` where there is no driver or no such GPU. Thread-safe. In a forked child of a process that has
// used CUDA it fails, as CUDA does.
Result<Device*> cuda_device(unsigned ordinal);

// The GPU whose memory holds an address. Errors as of cuda_device; invalid_argument for other memory.
Result<unsigned> cuda_device_of(const void* address);

// The first GPU that this process already uses, through Trunkline or torch. Never loads a driver or makes a
// context to find out.
std::optional<unsigned> cuda_device_in_use();

class PinnedBudget;

// Registers host memory with the CUDA driver, so that copies between it and GPUs (all of them) are
// asynchronous and fast; until what is returned is dropped, before the memory goes. Memory that lies within
// what this function has registered shares that, which then lasts until both are dropped. Memory that
// overlaps such a range without lying within it is refused (`device`): the driver registers no page twice,
// and copies must not span two registrations. `ordinal`: whose context it is done in; nullopt: of the GPU in
// use, else of the first. `budget`: a newly registered range counts there until it is released; memory that
// shares one is not counted again. Fails with `unsupported` as cuda_device() does, `out_of_budget` where it
// does not fit, `device` where the driver refuses. Thread-safe.
Result<std::shared_ptr<const void>> register_host_memory(std::span<std::byte> memory,
                                                         std::optional<unsigned> ordinal = std::nullopt,
                                                         std::shared_ptr<PinnedBudget> budget = nullptr);

// "cpu", "cuda:0".
std::string_view name_of(const Device& device);

}  // namespace trunkline
