// Copies between host memory and a device's that are waited for.
#pragma once

#include <cstddef>
#include <memory>

#include "device/device.h"

namespace trunkline {

// One thread at a time.
class BlockingCopies {
 public:
  static Result<BlockingCopies> open(Device& device);
  BlockingCopies(BlockingCopies&&) noexcept;
  BlockingCopies& operator=(BlockingCopies&&) noexcept;
  ~BlockingCopies();

  Status copy(Direction direction, std::byte* host, std::byte* device, std::uint64_t bytes);

 private:
  class Bell;
  BlockingCopies();

  std::unique_ptr<Bell> bell_;
  std::unique_ptr<CopyQueue> queue_;  // rings the bell: goes first
};

}  // namespace trunkline
