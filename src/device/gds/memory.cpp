#include "device/gds/memory.h"

#include <iterator>
#include <utility>

#include "device/gds/session.h"
#include "os/fork_generation.h"

namespace trunkline::cufile {

Registration RegisteredMemory::add(const cuda::CudaDevice& device, const Api& api,
                                   std::span<std::byte> memory) {
  const std::scoped_lock lock(mutex_);
  Location found = find_locked(memory);
  if (found.registration != nullptr || found.is_split) return std::move(found.registration);
  if (api.BufRegister(memory.data(), memory.size(), 0).code != kSuccess) return {};
  ranges_[memory.data()] = {.bytes = memory.size(), .device = &device, .api = &api};
  return hold_locked(memory.data());
}

RegisteredMemory::Location RegisteredMemory::find(std::span<std::byte> memory) {
  const std::scoped_lock lock(mutex_);
  return find_locked(memory);
}

RegisteredMemory::Location RegisteredMemory::find_locked(std::span<std::byte> memory) {
  std::byte* const end = memory.data() + memory.size();
  Location none{.base = memory.data(), .registration = nullptr};
  const auto after = ranges_.upper_bound(memory.data());
  none.is_split = after != ranges_.end() && after->first < end;
  if (after == ranges_.begin()) return none;
  const auto& [base, range] = *std::prev(after);
  if (end <= base + range.bytes) return {.base = base, .registration = hold_locked(base)};
  none.is_split = none.is_split || memory.data() < base + range.bytes;
  return none;
}

Registration RegisteredMemory::hold_locked(std::byte* base) {
  ++ranges_[base].holders;
  // In a forked child the range is its parent's, and the mutex may stay locked for ever.
  return {static_cast<const void*>(base), [this, base, generation = os::fork_generation()](const void*) {
            if (generation == os::fork_generation()) release(base);
          }};
}

void RegisteredMemory::release(std::byte* base) {
  // Locked until cuFile has deregistered it: add() must not register it again before.
  const std::scoped_lock lock(mutex_);
  const auto found = ranges_.find(base);
  if (--found->second.holders != 0) return;
  const cuda::ScopedContext context(*found->second.device);
  if (context.code() == cuda::kSuccess) found->second.api->BufDeregister(base);
  ranges_.erase(found);
}

Result<Registration> register_memory(const cuda::CudaDevice& device, std::span<std::byte> memory) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::uint64_t head = (kGdsAlignment - begin % kGdsAlignment) % kGdsAlignment;
  if (memory.size() < head + kGdsAlignment || why_unavailable()) return Registration();
  const std::uint64_t whole = (memory.size() - head) / kGdsAlignment * kGdsAlignment;
  const cuda::ScopedContext context(device);
  if (context.code() != cuda::kSuccess) return Registration();
  Session& session = device.gds();
  const auto api = session.open_driver();
  if (!api) return Registration();
  return session.memory().add(device, **api, memory.subspan(head, whole));
}

}  // namespace trunkline::cufile
