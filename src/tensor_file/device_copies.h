// Copies between staging blocks and the memory of devices.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "device/device.h"
#include "tensor_file/block_plan.h"

namespace trunkline::tensor_file {

// Thread-safe. Destruction waits for what is under way.
class DeviceCopies {
 public:
  // Called once, on any thread, also in start(); the memory is not used any more. Must not call start().
  using Done = std::function<void(const Status&)>;

  // Begins the copies between a block's bytes at `staged` and those of its extents that are in the memory of
  // devices, of which there is one at least. `done` is told of the first error, when all have ended.
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
  };

  Result<CopyQueue*> queue_of(Device& device);
  void ended(const std::vector<CopyQueue::Ended>& copies);

  std::mutex jobs_mutex_;
  std::map<std::uint32_t, Job> jobs_;  // by the tags of their copies
  std::uint32_t next_tag_ = 0;

  std::mutex queues_mutex_;
  std::list<Queue> queues_;  // last: what they still do goes into the jobs
};

// The first device that a block has bytes of; null where all are in host memory.
Device* device_of(const FileLayout& layout, const Block& block);

}  // namespace trunkline::tensor_file
