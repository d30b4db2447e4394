#include "cli/bench/ring_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>

#include "base/rounding.h"
#include "cli/bench/pattern.h"
#include "mem/page_sizes.h"

namespace trunkline::cli {
namespace {

constexpr std::uint64_t kOrdinaryStart =
    64;  // bytes past a page: where torch 2 puts CPU tensors of 1 MB and more

}  // namespace

void Unmap::operator()(std::byte* data) const { ::munmap(data, bytes); }

Result<RingMemory> RingMemory::allocate(const Engine& engine, MemoryKind kind, Device* device,
                                        std::uint64_t slots, std::uint64_t slot_bytes) {
  RingMemory memory;
  const std::uint64_t start = kind == MemoryKind::ordinary ? kOrdinaryStart : 0;
  memory.slot_bytes_ = slot_bytes;
  memory.stride_bytes_ = round_up(slot_bytes + start, kPageBytes);
  const std::uint64_t bytes = slots * memory.stride_bytes_;
  if (device != nullptr) {
    if (auto status = memory.allocate_on(engine, *device, bytes); !status)
      return std::unexpected(status.error());
    memory.base_ += start;
  } else if (kind == MemoryKind::aligned) {
    auto buffer = engine.allocate(bytes);
    if (!buffer) return std::unexpected(buffer.error());
    memory.aligned_ = std::move(*buffer);
    memory.base_ = memory.aligned_.data();
  } else {
    void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return std::unexpected(system_error(errno, fmt::format("map {} bytes of memory for transfers", bytes)));
    }
    memory.ordinary_ = {static_cast<std::byte*>(data), Unmap{bytes}};
    memory.base_ = memory.ordinary_.get() + start;
  }
  // Content that no device can compress; it may be the same in every slot.
  for (std::uint64_t index = 0; index < slots; ++index) {
    fill_pattern({}, 0, memory.begin_filling(index, slot_bytes));
    if (auto status = memory.filled(index, slot_bytes); !status) return std::unexpected(status.error());
  }
  return memory;
}

RingMemory RingMemory::over(std::span<std::byte> memory, std::uint64_t slot_bytes) {
  RingMemory result;
  result.base_ = memory.data();
  result.slot_bytes_ = slot_bytes;
  result.stride_bytes_ = slot_bytes;
  return result;
}

Status RingMemory::allocate_on(const Engine& engine, Device& device, std::uint64_t bytes) {
  auto memory = device.allocate(bytes);
  if (!memory) return std::unexpected(memory.error());
  auto buffer = engine.allocate(slot_bytes_);
  if (!buffer) return std::unexpected(buffer.error());
  auto copies = BlockingCopies::open(device);
  if (!copies) return std::unexpected(copies.error());
  auto registered =
      device.register_for_gds({static_cast<std::byte*>(memory->get()), static_cast<std::size_t>(bytes)});
  if (!registered) return std::unexpected(registered.error());
  device_ = &device;
  registered_ = std::move(*registered);
  device_memory_ = std::move(*memory);
  aligned_ = std::move(*buffer);
  copies_ = std::move(*copies);
  base_ = static_cast<std::byte*>(device_memory_.get());
  return {};
}

MemoryView RingMemory::slot(std::uint64_t index, std::uint64_t bytes) const {
  return {at(index), bytes, device_};
}

std::span<std::byte> RingMemory::begin_filling(std::uint64_t index, std::uint64_t bytes) {
  return {device_ != nullptr ? aligned_.data() : at(index), static_cast<std::size_t>(bytes)};
}

Status RingMemory::filled(std::uint64_t index, std::uint64_t bytes) {
  if (!copies_) return {};
  return copies_->copy(Direction::from_host, aligned_.data(), at(index), bytes);
}

Result<std::span<const std::byte>> RingMemory::contents(std::uint64_t index, std::uint64_t bytes) {
  const std::span<const std::byte> host = begin_filling(index, bytes);
  if (!copies_) return host;
  if (auto status = copies_->copy(Direction::to_host, aligned_.data(), at(index), bytes); !status)
    return std::unexpected(status.error());
  return host;
}

}  // namespace trunkline::cli
