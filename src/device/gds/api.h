// The functions of cuFile (GPUDirect Storage) that Trunkline uses, found by dlopen. Declared according to the
// cuFile API reference.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "device/cuda/api.h"
#include "trunkline/error.h"

namespace trunkline::cufile {

struct Outcome {  // CUfileError_t
  int code;       // CUfileOpError
  cuda::Code cuda_code;
};

using Handle = void*;  // CUfileHandle_t

struct Descriptor {  // CUfileDescr_t
  int type;          // kLinuxDescriptor
  union {
    int fd;
    void* handle;
  };
  const void* operations;  // of filesystems in user space
};

struct DriverProperties {  // CUfileDrvProps_t
  unsigned major_version;
  unsigned minor_version;
  std::size_t poll_threshold_bytes;
  std::size_t max_gds_bytes;
  unsigned status_flags;  // a bit for each kind of storage that DMA reaches
  unsigned control_flags;
  unsigned feature_flags;
  unsigned most_cached;
  unsigned most_cached_per_buffer;
  unsigned most_pinned;
  unsigned most_in_batch;
  unsigned batch_timeout;
  unsigned reserved[32];  // for fields of newer versions
};

inline constexpr int kSuccess = 0;
inline constexpr int kAlreadyOpen = 5026;  // CU_FILE_DRIVER_ALREADY_OPEN
inline constexpr int kLinuxDescriptor = 1;
inline constexpr unsigned kAllKnownAndAligned = 0xF;  // offsets, sizes and addresses, when a call is made

// Named like those of the library, without "cuFile".
// NOLINTBEGIN(readability-identifier-naming)
struct Api {
  Outcome (*DriverOpen)();
  Outcome (*DriverGetProperties)(DriverProperties* properties);
  Outcome (*HandleRegister)(Handle* handle, Descriptor* descriptor);
  void (*HandleDeregister)(Handle handle);
  Outcome (*BufRegister)(const void* memory, std::size_t bytes, int flags);
  Outcome (*BufDeregister)(const void* memory);
  Outcome (*StreamRegister)(cuda::Stream stream, unsigned flags);
  Outcome (*StreamDeregister)(cuda::Stream stream);
  // The pointers are dereferenced when the stream reaches the call.
  Outcome (*ReadAsync)(Handle handle, void* memory, std::size_t* bytes, off_t* file_offset,
                       off_t* memory_offset, ssize_t* moved, cuda::Stream stream);
  Outcome (*WriteAsync)(Handle handle, void* memory, std::size_t* bytes, off_t* file_offset,
                        off_t* memory_offset, ssize_t* moved, cuda::Stream stream);
};
// NOLINTEND(readability-identifier-naming)

// Loads `library`; opens nothing. `unsupported`, saying what is missing, where it cannot be used.
Result<Api> load(const std::string& library);

// "cannot ACTION: FUNCTION: ...": `action` as in "read to cuda:0", `function` as in "cuFileReadAsync".
Error error_of(Outcome outcome, std::string_view function, std::string_view action);

// The error of a read or write that reported `moved` as its bytes.
Error error_of_result(ssize_t moved, std::string_view action);

}  // namespace trunkline::cufile
