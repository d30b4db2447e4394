#include "records/batch_memory.h"

#include "base/rounding.h"
#include "os/fork_generation.h"
#include "trunkline/device.h"
#include "trunkline/units.h"

namespace trunkline::records {
namespace {

// Batches differ a little in size: a slot that grows for each that is larger would be allocated again often.
constexpr std::uint64_t kGranule = kMiB;

}  // namespace

Result<std::span<std::byte>> BatchMemory::Slot::reserve(std::uint64_t bytes) {
  if (bytes > buffer_.size()) {
    release_memory();
    auto buffer = engine_.allocate(round_up(bytes, kGranule));
    if (!buffer) return std::unexpected(buffer.error());
    buffer_ = std::move(*buffer);
    if (cuda_ordinal_) {
      auto registered = register_host_memory(buffer_.span(), cuda_ordinal_);
      if (!registered) return std::unexpected(registered.error());
      registration_ = std::move(*registered);
    }
  }
  return buffer_.span().first(bytes);
}

void BatchMemory::Slot::release_memory() {
  registration_.reset();
  buffer_ = Buffer();
}

std::shared_ptr<BatchMemory> BatchMemory::create(const Engine& engine, unsigned slots,
                                                 std::optional<unsigned> cuda_ordinal) {
  std::shared_ptr<BatchMemory> memory(new BatchMemory);
  for (unsigned index = 0; index < slots; ++index) {
    memory->slots_.push_back(std::unique_ptr<Slot>(new Slot(engine, cuda_ordinal)));
    memory->free_.push_back(memory->slots_.back().get());
  }
  return memory;
}

BatchMemory::Lease BatchMemory::acquire() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return closed_ || !free_.empty(); });
  if (closed_) return nullptr;
  Slot* const slot = free_.back();
  free_.pop_back();
  lock.unlock();
  return {slot, [memory = shared_from_this(), generation = os::fork_generation()](Slot* held) {
            if (generation == os::fork_generation()) memory->give_back(held);
          }};
}

bool BatchMemory::has_free_slot() const {
  const std::scoped_lock lock(mutex_);
  return !free_.empty();
}

void BatchMemory::close() {
  const std::scoped_lock lock(mutex_);
  closed_ = true;
  for (Slot* slot : free_) slot->release_memory();
  changed_.notify_all();
}

void BatchMemory::give_back(Slot* slot) {
  const std::scoped_lock lock(mutex_);
  if (closed_) slot->release_memory();
  free_.push_back(slot);
  changed_.notify_all();
}

}  // namespace trunkline::records
