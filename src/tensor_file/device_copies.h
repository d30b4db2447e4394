// Copies between staging blocks and device memory.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "base/trace.h"
#include "device/device.h"
#include "tensor_file/block_plan.h"

namespace trunkline::tensor_file {

// What a trace shows of the copies of one block: a slice for each device, on the device's track.
class CopyTrace {
 public:
  CopyTrace() = default;
  // The layout must outlive this.
  CopyTrace(const FileLayout& layout, Direction direction);

  void add(const Device& device, std::uint64_t bytes);

  // All have ended, with `error` if any failed.
  void end(const std::optional<Error>& error) const;

 private:
  struct Part {
    const Device* device = nullptr;
    std::uint64_t bytes = 0;
  };

  std::uint64_t start_ns_ = 0;  // 0 while no trace is recorded
  Direction direction_ = Direction::to_host;
  const FileLayout* layout_ = nullptr;
  std::vector<Part> parts_;
};

// Thread-safe. Destruction waits for copies in flight.
class DeviceCopies {
 public:
  // Called once, on any thread, possibly within start(), when the memory is no longer used. Must not call
  // start().
  using Done = std::function<void(const Status&)>;

  // Starts the copies between a block's bytes at `staged` and those of its extents that are in device memory,
  // of which there is at least one. Calls `done` when all have ended, with the first error if any.
  void start(const FileLayout& layout, const Block& block, std::byte* staged, Direction direction, Done done);

 private:
  struct Queue {
    Device* device = nullptr;
    std::unique_ptr<CopyQueue> copies;
  };
  struct Job {
    std::size_t left = 0;
    Done done;
    std::optional<Error> error;
    CopyTrace trace;
  };

  Result<CopyQueue*> queue_of(Device& device);
  void ended(const std::vector<CopyQueue::Completion>& copies);

  std::mutex jobs_mutex_;
  std::map<std::uint32_t, Job> jobs_;  // by the tags of their copies
  std::uint32_t next_tag_ = 0;

  std::mutex queues_mutex_;
  std::list<Queue> queues_;  // last, since what the queues still do accesses the jobs
};

// The first device that holds bytes of a block; nullptr where all are in host memory.
Device* device_of(const FileLayout& layout, const Block& block);

}  // namespace trunkline::tensor_file
