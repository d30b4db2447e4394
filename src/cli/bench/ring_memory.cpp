#include "cli/bench/ring_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>

#include "cli/bench/pattern.h"

namespace trunkline::cli {
namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kOrdinaryStart =
    64;  // bytes past a page: where torch 2 puts CPU tensors of 1 MB and more

}  // namespace

void Unmap::operator()(std::byte* data) const { ::munmap(data, bytes); }

Result<RingMemory> RingMemory::allocate(const Engine& engine, MemoryKind kind, std::uint64_t slots,
                                        std::uint64_t slot_bytes) {
  RingMemory memory;
  const std::uint64_t start = kind == MemoryKind::ordinary ? kOrdinaryStart : 0;
  memory.slot_bytes_ = slot_bytes;
  memory.stride_bytes_ = (slot_bytes + start + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::uint64_t bytes = slots * memory.stride_bytes_;
  if (kind == MemoryKind::aligned) {
    auto buffer = engine.allocate(bytes);
    if (!buffer) return std::unexpected(buffer.error());
    memory.aligned_ = std::move(*buffer);
    memory.base_ = memory.aligned_.data();
  } else {
    void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return std::unexpected(
          system_error(errno, fmt::format("mapping {} bytes of memory for transfers", bytes)));
    }
    memory.ordinary_ = {static_cast<std::byte*>(data), Unmap{bytes}};
    memory.base_ = memory.ordinary_.get() + start;
  }
  // Content that no device can compress; the same in every slot is enough for that.
  for (std::uint64_t index = 0; index < slots; ++index) fill_pattern({}, 0, memory.slot(index));
  return memory;
}

}  // namespace trunkline::cli
