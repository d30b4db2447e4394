// Page-aligned memory that counts against an engine's pinned budget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "trunkline/error.h"

namespace trunkline {

class PinnedBudget;

// Owned, zeroed, page-aligned memory (2 MiB-aligned and on huge pages where the kernel provides them), locked
// against swapping where RLIMIT_MEMLOCK allows. Every offset-aligned transfer reaches it without a copy.
// Movable, not copyable; destruction returns the bytes to the budget. Not synchronised.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&&) noexcept;
  Buffer& operator=(Buffer&&) noexcept;
  ~Buffer();

  // Fails with out_of_budget when `budget` has fewer bytes left, and with system (ENOMEM) when the kernel
  // refuses. bytes == 0 gives an empty buffer. Failing to lock the memory is not an error: see locked().
  static Result<Buffer> allocate(std::uint64_t bytes, std::shared_ptr<PinnedBudget> budget = nullptr);

  // The same, but not locked, and pages are allocated only when they are touched.
  static Result<Buffer> allocate_pageable(std::uint64_t bytes,
                                          std::shared_ptr<PinnedBudget> budget = nullptr);

  std::byte* data() const { return data_; }
  std::uint64_t size() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, bytes_}; }
  bool locked() const { return locked_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t mapped_bytes_ = 0;
  bool locked_ = false;
  std::shared_ptr<PinnedBudget> budget_;
};

}  // namespace trunkline
