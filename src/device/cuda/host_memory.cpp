#include "device/cuda/host_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "os/fork_generation.h"
#include "trunkline/units.h"

namespace trunkline::cuda {
namespace {

std::uintptr_t start_of(std::span<std::byte> memory) {
  return reinterpret_cast<std::uintptr_t>(memory.data());
}

}  // namespace

Result<Pin> RegisteredHostMemory::add(Device& device, std::span<std::byte> memory,
                                      std::shared_ptr<PinnedBudget> budget) {
  if (Pin shared = hold_covering(memory)) return shared;
  // Unlocked: what the budget frees to make room may be registered here, too.
  auto charged = charge(std::move(budget), memory.size());
  if (!charged) return std::unexpected(charged.error());
  const std::scoped_lock lock(mutex_);
  if (Pin shared = hold_covering_locked(memory)) return shared;
  if (const std::uint64_t registered = registered_bytes_locked(memory); registered > 0) {
    return std::unexpected(make_error(
        ErrorKind::device,
        fmt::format("cannot pin {} bytes of host memory: {} of them are pinned already, by another pin that "
                    "does not cover the rest; close that one first, or pin the whole before its parts",
                    memory.size(), registered)));
  }
  auto pinned = device.pin(memory);
  if (!pinned) return std::unexpected(pinned.error());
  const std::uintptr_t start = start_of(memory);
  ranges_.emplace(start,
                  Range{.bytes = memory.size(), .charge = *std::move(charged), .pin = *std::move(pinned)});
  return hold_locked(start);
}

Result<RegisteredHostMemory::Charge> RegisteredHostMemory::charge(std::shared_ptr<PinnedBudget> budget,
                                                                  std::uint64_t bytes) {
  if (budget == nullptr) return Charge();
  if (!budget->take(bytes)) {
    return std::unexpected(make_error(
        ErrorKind::out_of_budget,
        fmt::format("cannot pin {} of host memory: {} of the engine's budget of {} are in use; free buffers, "
                    "or create the Engine with a larger pinned_budget_bytes",
                    format_size(bytes), format_size(budget->used_bytes()),
                    format_size(budget->limit_bytes()))));
  }
  const void* const not_null = budget.get();  // a null pointer would not be a charge
  return Charge(not_null, [budget = std::move(budget), bytes](const void*) { budget->give_back(bytes); });
}

Pin RegisteredHostMemory::hold_covering(std::span<std::byte> memory) {
  const std::scoped_lock lock(mutex_);
  return hold_covering_locked(memory);
}

// A pin of the range that covers all of the memory; null where there is none.
Pin RegisteredHostMemory::hold_covering_locked(std::span<std::byte> memory) {
  const std::uintptr_t start = start_of(memory);
  auto found = ranges_.upper_bound(start);
  if (found == ranges_.begin()) return nullptr;
  --found;
  const std::uintptr_t end = found->first + found->second.bytes;
  return start + memory.size() <= end ? hold_locked(found->first) : nullptr;
}

// How many bytes of the memory are registered.
std::uint64_t RegisteredHostMemory::registered_bytes_locked(std::span<std::byte> memory) const {
  const std::uintptr_t start = start_of(memory);
  const std::uintptr_t end = start + memory.size();
  std::uint64_t registered = 0;
  for (const auto& [from, range] : ranges_) {
    const std::uintptr_t first = std::max(start, from);
    const std::uintptr_t last = std::min(end, from + range.bytes);
    if (first < last) registered += last - first;
  }
  return registered;
}

Pin RegisteredHostMemory::hold_locked(std::uintptr_t start) {
  ++ranges_.at(start).holders;
  // In a forked child the range is its parent's, and the mutex may stay locked for ever.
  return {static_cast<const void*>(this), [this, start, generation = os::fork_generation()](const void*) {
            if (generation == os::fork_generation()) release(start);
          }};
}

void RegisteredHostMemory::release(std::uintptr_t start) {
  // Locked until the driver has unregistered it: add() must not register it again before.
  const std::scoped_lock lock(mutex_);
  const auto found = ranges_.find(start);
  if (--found->second.holders == 0) ranges_.erase(found);
}

}  // namespace trunkline::cuda
