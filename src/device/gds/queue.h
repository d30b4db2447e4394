// Transfers between files and the memory of a GPU by cuFile.
#pragma once

#include <functional>
#include <memory>

#include "device/cuda/device.h"

namespace trunkline::cufile {

// See Device::open_gds_queue.
Result<std::unique_ptr<GdsQueue>> open_queue(const cuda::CudaDevice& device,
                                             std::function<void()> on_completion);

}  // namespace trunkline::cufile
