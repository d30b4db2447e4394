// The memory that operations read into and write from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace trunkline {

class Device;  // where the bytes live; trunkline/device.h

// Contiguous bytes owned by the caller, on the host or on a device. A view owns nothing: the caller keeps the
// bytes alive until the operation is done, or passes a Keepalive with it.
struct MemoryView {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  Device* device = nullptr;  // nullptr: host memory
  // A stream of the device: the operation starts after the work queued on it at submission (a CUstream; null:
  // the default stream).
  void* stream = nullptr;

  MemoryView() = default;
  MemoryView(std::byte* data_in, std::uint64_t bytes_in, Device* device_in = nullptr,
             void* stream_in = nullptr)
      : data(data_in), bytes(bytes_in), device(device_in), stream(stream_in) {}
  MemoryView(std::span<std::byte> span) : data(span.data()), bytes(span.size()) {}  // NOLINT(*-explicit-*)
};

// Held by an operation until no kernel or device can touch its memory any more, then dropped (on any thread).
using Keepalive = std::shared_ptr<const void>;

}  // namespace trunkline
