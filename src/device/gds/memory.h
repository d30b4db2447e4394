// GPU memory that is registered with cuFile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "device/cuda/device.h"
#include "device/gds/api.h"

namespace trunkline::cufile {

// Keeps a range registered while it exists.
using Registration = std::shared_ptr<const void>;

// The ranges of GPU memory that are registered with cuFile. They do not overlap. A range stays registered
// while anybody holds its Registration; every transfer under way does, since cuFile must not lose memory that
// it works on. Thread-safe. Lives as long as the process.
class RegisteredMemory {
 public:
  // Registers a range whose start and length are multiples of kGdsAlignment. A range within a registered one
  // shares its registration. Null where it overlaps one in part, or where cuFile does not accept it:
  // transfers work all the same, slower. The calling thread has the device's context.
  Registration add(const cuda::CudaDevice& device, const Api& api, std::span<std::byte> memory);

  // How a transfer addresses its memory: cuFile requires the start of a registered range, and an offset.
  struct Location {
    std::byte* base = nullptr;  // of the registered range; where there is none, of the memory itself
    Registration registration;  // null where there is none
    bool is_split = false;      // a part of the memory is registered, and the rest is not
  };
  Location find(std::span<std::byte> memory);

 private:
  struct Range {
    std::uint64_t bytes = 0;
    const cuda::CudaDevice* device = nullptr;
    const Api* api = nullptr;
    unsigned holders = 0;
  };

  Location find_locked(std::span<std::byte> memory);
  Registration hold_locked(std::byte* base);
  void release(std::byte* base);

  std::mutex mutex_;
  std::map<std::byte*, Range> ranges_;  // by start address
};

// See Device::register_for_gds. Registers the whole units of kGdsAlignment in `memory`.
Result<Registration> register_memory(const cuda::CudaDevice& device, std::span<std::byte> memory);

}  // namespace trunkline::cufile
