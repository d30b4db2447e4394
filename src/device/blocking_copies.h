// Copies between host memory and a device's memory that block until they are done.
#pragma once

#include <cstddef>
#include <memory>

#include "device/device.h"

namespace trunkline {

// Used by one thread at a time.
class BlockingCopies {
 public:
  static Result<BlockingCopies> open(Device& device);
  BlockingCopies(BlockingCopies&&) noexcept;
  BlockingCopies& operator=(BlockingCopies&&) noexcept;
  ~BlockingCopies();

  Status copy(Direction direction, std::byte* host, std::byte* device, std::uint64_t bytes);

 private:
  class Signal;
  BlockingCopies();

  std::unique_ptr<Signal> completed_;
  std::unique_ptr<CopyQueue> queue_;  // destroyed first: it notifies completed_
};

}  // namespace trunkline
