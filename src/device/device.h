// Where a caller's bytes live, and how they get to and from the engine's host memory.
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

// A point in the work of one of a device's streams: copies that are given it begin when the stream has passed
// it.
using Fence = std::shared_ptr<const void>;

struct Copy {
  Direction direction = Direction::from_host;
  std::byte* host = nullptr;  // best in memory that the device knows: see Device::pin
  std::byte* device = nullptr;
  std::uint64_t bytes = 0;
  Fence after;            // or null
  std::uint32_t tag = 0;  // of the caller
};

// Copies under way between host memory and one device. start() and send() by one thread at a time, take() by
// any; destruction waits for what is under way.
class CopyQueue {
 public:
  struct Ended {
    std::uint32_t tag = 0;
    std::optional<Error> error;
  };

  virtual ~CopyQueue() = default;

  // Begins a copy, at the next send() at the latest. What goes wrong is told by take().
  virtual void start(Copy copy) = 0;
  virtual void send() = 0;

  // Appends the copies that have ended since.
  virtual void take(std::vector<Ended>& ended) = 0;
};

// An open file that a device reads and writes itself, without memory of the host between (GPUDirect Storage).
// Dropped before its descriptor is closed. In a forked child dropping it does nothing.
class GdsFile {
 public:
  GdsFile() = default;
  GdsFile(const GdsFile&) = delete;
  GdsFile& operator=(const GdsFile&) = delete;
  virtual ~GdsFile() = default;
};

// How much must be shown before a file is taken for one that a device reaches itself.
enum class GdsProbe {
  real,  // that no bytes go through this process
  works  // that the bytes arrive
};

struct GdsSource {
  int fd = -1;            // opened with O_DIRECT
  std::string path;       // for messages
  std::string directory;  // that it is in: a probe file may be made there, and removed
  // As another device was given it before, or null.
  std::shared_ptr<const GdsFile> known = {};
};

// Offset, address and length are multiples of this.
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

// Copies under way between files and one device's memory. As a CopyQueue.
class GdsQueue {
 public:
  struct Ended {
    std::uint32_t tag = 0;
    Result<std::uint64_t> bytes = 0;  // as many as moved, of the first; the error says why none did
    bool again = false;               // the error is of the file, and will come again
  };

  virtual ~GdsQueue() = default;
  virtual void start(GdsTransfer copy) = 0;
  virtual void send() = 0;
  virtual void take(std::vector<Ended>& ended) = 0;
};

// Thread-safe. Lives as long as the process.
class Device {
 public:
  virtual ~Device() = default;

  virtual std::string_view name() const = 0;  // "cpu", "cuda:0"

  // Whether a disk's DMA and the CPU can work on this memory as it is; if not, every transfer goes through
  // memory of the engine, with copies by a CopyQueue.
  virtual bool host_accessible() const = 0;

  // `on_ended` is called on some thread whenever take() has something new.
  virtual Result<std::unique_ptr<CopyQueue>> open_queue(std::function<void()> on_ended) = 0;

  // The work that `stream`, one of the device's (null: its default stream), holds now.
  virtual Result<Fence> fence(void* stream) = 0;

  // Memory of the device, given back when what is returned is dropped.
  virtual Result<std::shared_ptr<void>> allocate(std::uint64_t bytes) = 0;

  // Tells the driver of host memory that many copies will use: they run faster, and beside other work; those
  // of its other devices too. Given back when what is returned is dropped, before the memory goes.
  virtual Result<std::shared_ptr<const void>> pin(std::span<std::byte> memory) = 0;

  // The file for a GdsQueue of this device; `unsupported`, saying why, where that is not possible or not
  // proven. The first file of a filesystem is read for it, or one beside it.
  virtual Result<std::shared_ptr<const GdsFile>> open_gds(const GdsSource& source, GdsProbe proof) = 0;

  virtual Result<std::unique_ptr<GdsQueue>> open_gds_queue(std::function<void()> on_ended) = 0;

  // Tells the driver of memory of this device that many direct copies will use: they need no copy within the
  // device then. Given back when what is returned is dropped, before the memory goes. Null where the driver
  // is not there or does not take it, which costs speed alone.
  virtual Result<std::shared_ptr<const void>> register_for_gds(std::span<std::byte> memory) = 0;
};

inline bool is_host(const MemoryView& memory) {
  return memory.device == nullptr || memory.device->host_accessible();
}

}  // namespace trunkline
