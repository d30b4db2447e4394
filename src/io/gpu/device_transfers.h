// One lane's transfers to and from device memory: copies between its slots and the device, and GPUDirect
// Storage between the file and the device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "device/device.h"
#include "io/lane/transfer.h"
#include "io/refusal_log.h"

namespace trunkline::io {

// For use by the lane's thread only.
class DeviceTransfers {
 public:
  // `wake`: called from any thread when a transfer has ended, so that the lane calls take().
  DeviceTransfers(std::function<void()> wake, RefusalLog& refusals)
      : wake_(std::move(wake)), refusals_(refusals) {}

  // Opens what the transfer needs on its device, the first time it is needed. `slots`: all of the lane's
  // slots, which copies go through.
  Status prepare_copy(Device& device, std::span<std::byte> slots);
  Status prepare_gds(Device& device);

  // Copies between the transfer's slot and its memory; after prepare_copy().
  void start_copy(const Transfer& transfer, std::uint32_t tag);
  // Transfers between the file and the transfer's memory; after prepare_gds().
  void start_gds(const Transfer& transfer, std::uint32_t tag);
  // Submits to the devices what was started since the last call.
  void send();

  unsigned under_way() const { return under_way_; }
  std::vector<CopyQueue::Completion> take_copies();
  std::vector<GdsQueue::Completion> take_gds();

 private:
  template <class Queue>
  using PerDevice = std::vector<std::pair<Device*, std::unique_ptr<Queue>>>;

  std::function<void()> wake_;
  RefusalLog& refusals_;
  std::shared_ptr<const void> pin_;  // of the slots
  PerDevice<CopyQueue> copy_queues_;
  PerDevice<GdsQueue> gds_queues_;
  unsigned under_way_ = 0;
};

}  // namespace trunkline::io
