// A point in the work of a stream, as an event.
#pragma once

#include "device/cuda/device.h"

namespace trunkline::cuda {

struct RecordedEvent {
  RecordedEvent(const CudaDevice& device_in, Event event_in) : device(device_in), event(event_in) {}
  RecordedEvent(const RecordedEvent&) = delete;
  RecordedEvent& operator=(const RecordedEvent&) = delete;
  ~RecordedEvent() {
    if (!device.usable()) return;
    const ScopedContext context(device);
    device.api().EventDestroy(event);
  }

  const CudaDevice& device;
  const Event event;
};

// Of a fence that CudaDevice::fence made.
inline Event event_of(const Fence& fence) { return static_cast<const RecordedEvent*>(fence.get())->event; }

}  // namespace trunkline::cuda
