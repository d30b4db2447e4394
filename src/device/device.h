// Devices: where the memory of a caller is, and how bytes move between it and host memory or files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/error.h"
#include "trunkline/memory.h"

namespace trunkline {

enum class Direction { from_host, to_host };

// A point in the work of one of a device's streams. A copy with a fence starts after the stream has reached
// it.
using Fence = std::shared_ptr<const void>;

struct Copy {
  Direction direction = Direction::from_host;
  std::byte* host = nullptr;  // copies are faster if it is pinned: see Device::pin
  std::byte* device = nullptr;
  std::uint64_t bytes = 0;
  Fence after;            // or null
  std::uint32_t tag = 0;  // of the caller
};

// Copies in flight between host memory and one device. One thread at a time calls start() and send(); any
// thread calls take(). The destructor waits for all copies in flight.
class CopyQueue {
 public:
  struct Completion {
    std::uint32_t tag = 0;
    std::optional<Error> error;
  };

  virtual ~CopyQueue() = default;

  // Starts a copy, at the latest in the next send(). Errors are reported by take().
  virtual void start(Copy copy) = 0;
  virtual void send() = 0;

  // Appends the copies that have ended since the last call.
  virtual void take(std::vector<Completion>& completions) = 0;
};

// An open file that a device reads and writes itself, without host memory in between (GPUDirect Storage). It
// is dropped before the file's descriptor is closed. Dropping it in a forked child does nothing.
class GdsFile {
 public:
  GdsFile() = default;
  GdsFile(const GdsFile&) = delete;
  GdsFile& operator=(const GdsFile&) = delete;
  virtual ~GdsFile() = default;
};

// What a probe of a file must show before the device reads and writes it itself.
enum class GdsProbe {
  bypasses_host,  // reads return the right bytes, and none of them go through this process
  correct_data    // reads return the right bytes
};

struct GdsSource {
  int fd = -1;            // opened with O_DIRECT
  std::string path;       // for messages
  std::string directory;  // of the file; a probe file may be created in it, and removed
  // What open_gds() of another device returned for this file, or null.
  std::shared_ptr<const GdsFile> known = {};
};

// The offset, address and length of a GdsTransfer are multiples of this.
inline constexpr std::uint64_t kGdsAlignment = 4096;

struct GdsTransfer {
  bool to_file = false;
  std::shared_ptr<const GdsFile> file;
  std::uint64_t offset = 0;  // in the file
  std::byte* device = nullptr;
  std::uint64_t bytes = 0;
  Fence after;            // or null
  std::uint32_t tag = 0;  // of the caller
};

// Transfers in flight between files and one device's memory. Used like a CopyQueue.
class GdsQueue {
 public:
  struct Completion {
    std::uint32_t tag = 0;
    Result<std::uint64_t> bytes = 0;  // transferred, from the beginning; an error: none were
    bool permanent = false;           // later transfers of this file will fail alike
  };

  virtual ~GdsQueue() = default;
  virtual void start(GdsTransfer transfer) = 0;
  virtual void send() = 0;
  virtual void take(std::vector<Completion>& completions) = 0;
};

// Thread-safe. Exists until the process ends.
class Device {
 public:
  virtual ~Device() = default;

  virtual std::string_view name() const = 0;  // "cpu", "cuda:0"

  // Whether the CPU and the DMA of disks access this memory directly. If not, every transfer goes through the
  // engine's host memory, copied by a CopyQueue.
  virtual bool host_accessible() const = 0;

  // `on_completion` is called, on any thread, whenever take() has something new.
  virtual Result<std::unique_ptr<CopyQueue>> open_queue(std::function<void()> on_completion) = 0;

  // The end of the work that `stream` of this device (null: the default stream) holds now.
  virtual Result<Fence> fence(void* stream) = 0;

  // Allocates memory of the device, which is freed when the returned handle is dropped.
  virtual Result<std::shared_ptr<void>> allocate(std::uint64_t bytes) = 0;

  // Page-locks host memory and registers it with the driver: copies of all of its devices become faster and
  // asynchronous. Undone when the returned handle is dropped, which must happen before the memory is freed.
  virtual Result<std::shared_ptr<const void>> pin(std::span<std::byte> memory) = 0;

  // Opens a file for a GdsQueue of this device. Fails with `unsupported`, and the reason, if the device
  // cannot access it or the probe does not show that it can. The first file of each filesystem is probed, or
  // a file that is created beside it.
  virtual Result<std::shared_ptr<const GdsFile>> open_gds(const GdsSource& source, GdsProbe probe) = 0;

  virtual Result<std::unique_ptr<GdsQueue>> open_gds_queue(std::function<void()> on_completion) = 0;

  // Registers memory of this device that many GdsTransfers will use: they need no copy within the device
  // then. Undone when the returned handle is dropped, which must happen before the memory is freed. Null
  // where the driver is missing or does not accept the memory: transfers work all the same, more slowly.
  virtual Result<std::shared_ptr<const void>> register_for_gds(std::span<std::byte> memory) = 0;
};

inline bool is_host(const MemoryView& memory) {
  return memory.device == nullptr || memory.device->host_accessible();
}

}  // namespace trunkline
