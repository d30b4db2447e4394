// Files that cuFile moves to and from GPUs.
#pragma once

#include <memory>

#include "device/cuda/device.h"
#include "device/gds/api.h"

namespace trunkline::cufile {

// See Device::open_gds.
Result<std::shared_ptr<const GdsFile>> open_file(const cuda::CudaDevice& device, const GdsSource& source,
                                                 GdsProbe proof);

// What was found out of filesystems is found out again. For tests, which change it.
void forget_verdicts();

// Of a file that open_file opened.
const Api& api_of(const GdsFile& file);
Handle handle_of(const GdsFile& file);

}  // namespace trunkline::cufile
