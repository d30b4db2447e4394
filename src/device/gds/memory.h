// Memory of GPUs that cuFile was told of.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "device/cuda/device.h"

namespace trunkline::cufile {

// See Device::register_for_gds. Whole units of kGdsAlignment are registered. Asking again for what lies
// within memory that is registered shares that.
Result<std::shared_ptr<const void>> register_memory(const cuda::CudaDevice& device,
                                                    std::span<std::byte> memory);

// The start of the registered memory in which these bytes lie, kept while `hold` is; they themselves, and no
// hold, where they do not.
struct Registered {
  std::byte* base = nullptr;
  std::shared_ptr<const void> hold;
  bool in_part = false;  // some of them lie in registered memory, and not all
};
Registered find_registered(std::span<std::byte> memory);

}  // namespace trunkline::cufile
