// Files that cuFile moves to and from GPUs.
#pragma once

#include <memory>

#include "device/cuda_device.h"
#include "device/cufile_api.h"

namespace trunkline::cufile {

// See Device::open_direct.
Result<std::shared_ptr<const DirectFile>> open_file(const cuda::CudaDevice& device,
                                                    const DirectSource& source, DirectProof proof);

// Of a file that open_file opened.
const Api& api_of(const DirectFile& file);
Handle handle_of(const DirectFile& file);

}  // namespace trunkline::cufile
