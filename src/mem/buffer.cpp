#include "trunkline/buffer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "base/rounding.h"
#include "mem/page_sizes.h"
#include "mem/pinned_budget.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 62;

std::uint64_t alignment_for(std::uint64_t bytes) {
  return bytes >= kHugePageBytes ? kHugePageBytes : kPageBytes;
}

// Anonymous memory whose start is a multiple of `alignment`: maps more than needed, then unmaps the excess.
std::byte* map_aligned(std::uint64_t bytes, std::uint64_t alignment) {
  const std::uint64_t spare = alignment > kPageBytes ? alignment : 0;
  void* mapped = ::mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* start = static_cast<std::byte*>(mapped);
  if (spare == 0) return start;
  const std::uint64_t misplaced = reinterpret_cast<std::uintptr_t>(start) % alignment;
  const std::uint64_t head = misplaced == 0 ? 0 : alignment - misplaced;
  if (head != 0) ::munmap(start, head);
  if (spare != head) ::munmap(start + head + bytes, spare - head);
  return start + head;
}

}  // namespace

Result<Buffer> Buffer::allocate_pageable(std::uint64_t bytes, std::shared_ptr<PinnedBudget> budget) {
  Buffer buffer;
  if (bytes == 0) return buffer;
  if (bytes > kMaxBytes) {
    return std::unexpected(system_error(ENOMEM, fmt::format("allocate {} bytes of memory", bytes)));
  }
  const std::uint64_t mapped_bytes = round_up(bytes, kPageBytes);
  if (budget && !budget->take(mapped_bytes)) {
    return std::unexpected(make_error(
        ErrorKind::out_of_budget,
        fmt::format("cannot allocate {} of pinned memory: {} of the engine's budget of {} are in use; free "
                    "buffers, or create the Engine with a larger pinned_budget_bytes",
                    format_size(mapped_bytes), format_size(budget->used_bytes()),
                    format_size(budget->limit_bytes()))));
  }
  std::byte* data = map_aligned(mapped_bytes, alignment_for(mapped_bytes));
  if (data == nullptr) {
    const int code = errno;
    if (budget) budget->give_back(mapped_bytes);
    return std::unexpected(system_error(code, fmt::format("map {} of memory", format_bytes(mapped_bytes))));
  }
  buffer.data_ = data;
  buffer.bytes_ = bytes;
  buffer.mapped_bytes_ = mapped_bytes;
  buffer.budget_ = std::move(budget);
  // Huge pages save the kernel 511 of 512 page look-ups per transfer; failure is harmless.
  if (mapped_bytes >= kHugePageBytes) ::madvise(data, mapped_bytes, MADV_HUGEPAGE);
  return buffer;
}

Result<Buffer> Buffer::allocate(std::uint64_t bytes, std::shared_ptr<PinnedBudget> budget) {
  auto buffer = allocate_pageable(bytes, std::move(budget));
  if (!buffer || buffer->mapped_bytes_ == 0) return buffer;
  buffer->locked_ = ::mlock(buffer->data_, buffer->mapped_bytes_) == 0;
#ifdef MADV_POPULATE_WRITE
  // Pinned memory must be resident: no page faults in the middle of the first transfer.
  if (!buffer->locked_) ::madvise(buffer->data_, buffer->mapped_bytes_, MADV_POPULATE_WRITE);
#endif
  return buffer;
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      mapped_bytes_(std::exchange(other.mapped_bytes_, 0)),
      locked_(std::exchange(other.locked_, false)),
      budget_(std::move(other.budget_)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  Buffer taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(bytes_, taken.bytes_);
  std::swap(mapped_bytes_, taken.mapped_bytes_);
  std::swap(locked_, taken.locked_);
  std::swap(budget_, taken.budget_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  ::munmap(data_, mapped_bytes_);
  if (budget_) budget_->give_back(mapped_bytes_);
}

}  // namespace trunkline
