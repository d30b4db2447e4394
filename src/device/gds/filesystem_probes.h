// Whether cuFile reaches the files of a filesystem, determined by reading one of them.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "device/cuda/device.h"

namespace trunkline::cufile {

class CufileFile;

// Why a probe failed; nullopt: it succeeded.
using WhyNot = std::optional<std::string>;

// Probes each filesystem once for each device and kind of probe, and remembers the results. Thread-safe.
class FilesystemProbes {
 public:
  // The result for the filesystem of `source`, of which `file` is the registered file. An error says nothing
  // of the filesystem, and is not remembered. The calling thread has the device's context.
  Result<WhyNot> probe(const cuda::CudaDevice& device, const CufileFile& file, const GdsSource& source,
                       GdsProbe kind);

  // For tests, in which cuFile changes.
  void forget();

  // What probes of a device work with. Kept until the process ends: freeing it waits for all work of the
  // device.
  struct Memory {
    cuda::DevicePointer address = 0;
    cuda::Stream stream = nullptr;
  };

 private:
  using Key = std::tuple<dev_t, std::string_view, GdsProbe>;

  std::optional<WhyNot> find(const Key& key);
  Result<WhyNot> run(const cuda::CudaDevice& device, const CufileFile& file, const GdsSource& source,
                     const struct stat& status, GdsProbe kind);
  Result<Memory> memory_of(const cuda::CudaDevice& device);

  std::mutex probing_;                         // while a probe runs, so that one runs at a time
  std::map<std::string_view, Memory> memory_;  // by device; guarded by probing_
  std::mutex mutex_;                           // never held during I/O
  std::map<Key, WhyNot> results_;              // guarded by mutex_
};

}  // namespace trunkline::cufile
