#include "device/gds/memory.h"

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include "device/gds/session.h"
#include "os/fork_generation.h"

namespace trunkline::cufile {
namespace {

using Hold = std::shared_ptr<const void>;

// By start address; holders are counted, transfers under way among them: cuFile must not lose memory that it
// works on.
class RegisteredRanges {
 public:
  Hold add(const cuda::CudaDevice& device, const Api& api, std::span<std::byte> memory) {
    const std::scoped_lock lock(mutex_);
    Registered found = find_locked(memory);
    if (found.hold != nullptr || found.in_part) return std::move(found.hold);
    if (api.BufRegister(memory.data(), memory.size(), 0).code != kSuccess) return {};
    ranges_[memory.data()] = {.bytes = memory.size(), .device = &device, .api = &api};
    return hold(memory.data());
  }

  Registered find(std::span<std::byte> memory) {
    const std::scoped_lock lock(mutex_);
    return find_locked(memory);
  }

 private:
  struct Range {
    std::uint64_t bytes = 0;
    const cuda::CudaDevice* device = nullptr;
    const Api* api = nullptr;
    unsigned holders = 0;
  };

  Registered find_locked(std::span<std::byte> memory) {
    std::byte* const end = memory.data() + memory.size();
    Registered none{.base = memory.data(), .hold = nullptr};
    const auto behind = ranges_.upper_bound(memory.data());
    none.in_part = behind != ranges_.end() && behind->first < end;
    if (behind == ranges_.begin()) return none;
    const auto& [base, range] = *std::prev(behind);
    if (end <= base + range.bytes) return {.base = base, .hold = hold(base)};
    none.in_part = none.in_part || memory.data() < base + range.bytes;
    return none;
  }

  Hold hold(std::byte* base) {
    ++ranges_[base].holders;
    // In a forked child the range is its parent's, and the lock may be held forever.
    return {static_cast<const void*>(base), [this, base, generation = os::fork_generation()](const void*) {
              if (generation == os::fork_generation()) drop(base);
            }};
  }

  void drop(std::byte* base) {
    const std::scoped_lock lock(mutex_);  // while cuFile lets go too: nobody registers it before
    const auto found = ranges_.find(base);
    if (--found->second.holders != 0) return;
    const cuda::Current current(*found->second.device);
    if (current.code() == cuda::kSuccess) found->second.api->BufDeregister(base);
    ranges_.erase(found);
  }

  std::mutex mutex_;
  std::map<std::byte*, Range> ranges_;
};

RegisteredRanges& ranges() {
  static auto* kept = new RegisteredRanges;  // NOLINT(cppcoreguidelines-owning-memory): until the very end
  return *kept;
}

}  // namespace

Result<std::shared_ptr<const void>> register_memory(const cuda::CudaDevice& device,
                                                    std::span<std::byte> memory) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::uint64_t head = (kGdsAlignment - begin % kGdsAlignment) % kGdsAlignment;
  if (memory.size() < head + kGdsAlignment || why_not_here()) return Hold();
  const std::uint64_t whole = (memory.size() - head) / kGdsAlignment * kGdsAlignment;
  const cuda::Current current(device);
  if (current.code() != cuda::kSuccess) return Hold();
  const auto api = open_driver();
  if (!api) return Hold();
  return ranges().add(device, **api, memory.subspan(head, whole));
}

Registered find_registered(std::span<std::byte> memory) { return ranges().find(memory); }

}  // namespace trunkline::cufile
