// Compiled by python/tests/test_nvidia_headers.py, which writes functions.h: a line for each symbol that
// src/device looks for, such as SAME(cuda::Api, Init, cuInit).
#include "check.h"

#include <cuda.h>
#include <cufile.h>

#include "device/cuda/api.h"
#include "device/gds/api.h"

namespace trunkline {
namespace {

#define SAME(api, ours, theirs) \
  static_assert(nvidia_headers::Alike<decltype(api::ours), decltype(&(theirs))>::value, #theirs)
#include "functions.h"
#undef SAME

static_assert(cuda::kSuccess == CUDA_SUCCESS);
static_assert(cuda::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(cuda::kCaptureImplicit == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
static_assert(cuda::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(cuda::kEventBlockingSync == CU_EVENT_BLOCKING_SYNC);
static_assert(cuda::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(cuda::kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(cuda::kPointerDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(cuda::kNotCapturing == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(cuda::kRelaxedCapture == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(int{cuda::pci_bus} == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
static_assert(int{cuda::pci_device} == CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
static_assert(int{cuda::pci_domain} == CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
static_assert(int{cuda::compute_major} == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(int{cuda::compute_minor} == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(int{cuda::gpu_direct_rdma} == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED);

static_assert(cufile::kSuccess == CU_FILE_SUCCESS);
static_assert(cufile::kAlreadyOpen == CU_FILE_DRIVER_ALREADY_OPEN);
static_assert(cufile::kLinuxDescriptor == CU_FILE_HANDLE_TYPE_OPAQUE_FD);
static_assert(cufile::kAllKnownAndAligned ==
              (CU_FILE_STREAM_FIXED_BUF_OFFSET | CU_FILE_STREAM_FIXED_FILE_OFFSET |
               CU_FILE_STREAM_FIXED_FILE_SIZE | CU_FILE_STREAM_PAGE_ALIGNED_INPUTS));

static_assert(sizeof(cufile::Outcome) == sizeof(CUfileError_t));
static_assert(offsetof(cufile::Outcome, code) == offsetof(CUfileError_t, err));
static_assert(offsetof(cufile::Outcome, cuda_code) == offsetof(CUfileError_t, cu_err));

static_assert(sizeof(cufile::Descriptor) == sizeof(CUfileDescr_t));
static_assert(offsetof(cufile::Descriptor, type) == offsetof(CUfileDescr_t, type));
static_assert(offsetof(cufile::Descriptor, fd) == offsetof(CUfileDescr_t, handle));
static_assert(offsetof(cufile::Descriptor, operations) == offsetof(CUfileDescr_t, fs_ops));

// Newer libraries may write more fields than these headers have: ours has room for them.
using Ours = cufile::DriverProperties;
using Theirs = CUfileDrvProps_t;
static_assert(sizeof(Ours) >= sizeof(Theirs));
static_assert(offsetof(Ours, reserved) >= sizeof(unsigned) + offsetof(Theirs, max_batch_io_timeout_msecs));
static_assert(offsetof(Ours, major_version) == offsetof(Theirs, nvfs.major_version));
static_assert(offsetof(Ours, minor_version) == offsetof(Theirs, nvfs.minor_version));
static_assert(offsetof(Ours, poll_threshold_bytes) == offsetof(Theirs, nvfs.poll_thresh_size));
static_assert(offsetof(Ours, max_gds_bytes) == offsetof(Theirs, nvfs.max_direct_io_size));
static_assert(offsetof(Ours, status_flags) == offsetof(Theirs, nvfs.dstatusflags));
static_assert(offsetof(Ours, control_flags) == offsetof(Theirs, nvfs.dcontrolflags));
static_assert(offsetof(Ours, feature_flags) == offsetof(Theirs, fflags));
static_assert(offsetof(Ours, most_cached) == offsetof(Theirs, max_device_cache_size));
static_assert(offsetof(Ours, most_cached_per_buffer) == offsetof(Theirs, per_buffer_cache_size));
static_assert(offsetof(Ours, most_pinned) == offsetof(Theirs, max_device_pinned_mem_size));
static_assert(offsetof(Ours, most_in_batch) == offsetof(Theirs, max_batch_io_size));
static_assert(offsetof(Ours, batch_timeout) == offsetof(Theirs, max_batch_io_timeout_msecs));

}  // namespace
}  // namespace trunkline
