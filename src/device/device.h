// Where a caller's bytes live, and how they get to and from the engine's host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace trunkline {

// Thread-safe.
class Device {
 public:
  virtual ~Device() = default;

  virtual std::string_view name() const = 0;  // "cpu", "cuda:0"

  // Whether a disk's DMA and the CPU can work on this memory as it is; if not, every transfer bounces.
  virtual bool host_accessible() const = 0;

  virtual void copy_from_host(std::byte* target, const std::byte* source, std::uint64_t bytes) = 0;
  virtual void copy_to_host(std::byte* target, const std::byte* source, std::uint64_t bytes) = 0;
};

Device& host_device();

}  // namespace trunkline
