// Where a caller's bytes live, and how they get to and from the engine's host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
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

  // Tells the driver of host memory that many copies will use: they run faster, and beside other work; those
  // of its other devices too. Given back when what is returned is dropped, before the memory goes.
  virtual Result<std::shared_ptr<const void>> pin(std::span<std::byte> memory) = 0;
};

inline bool is_host(const MemoryView& memory) {
  return memory.device == nullptr || memory.device->host_accessible();
}

}  // namespace trunkline
