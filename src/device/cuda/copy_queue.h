// Copies to and from a GPU, with a stream for each direction.
#pragma once

#include <memory>

#include "device/cuda/device.h"

namespace trunkline::cuda {

Result<std::unique_ptr<CopyQueue>> open_copy_queue(const CudaDevice& device,
                                                   std::function<void()> on_completion);

}  // namespace trunkline::cuda
