// A hard limit on the bytes of pinned memory of one engine. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

namespace trunkline {

class PinnedBudget {
 public:
  explicit PinnedBudget(std::uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // `give_up` frees memory that is only kept for reuse, when the budget runs short. Set before use.
  void on_shortage(std::function<void()> give_up) { give_up_ = std::move(give_up); }

  // Like try_take, but frees memory that is only kept for reuse before it fails.
  bool take(std::uint64_t bytes) {
    if (try_take(bytes)) return true;
    if (!give_up_) return false;
    give_up_();
    return try_take(bytes);
  }

  // Takes `bytes` if they fit beside what is already taken; otherwise takes nothing.
  bool try_take(std::uint64_t bytes) {
    std::uint64_t used = used_bytes_.load();
    do {
      if (bytes > limit_bytes_ || used > limit_bytes_ - bytes) return false;
    } while (!used_bytes_.compare_exchange_weak(used, used + bytes));
    std::uint64_t peak = peak_bytes_.load();
    while (peak < used + bytes && !peak_bytes_.compare_exchange_weak(peak, used + bytes)) {
    }
    return true;
  }
  void give_back(std::uint64_t bytes) { used_bytes_.fetch_sub(bytes); }

  std::uint64_t limit_bytes() const { return limit_bytes_; }
  std::uint64_t used_bytes() const { return used_bytes_.load(); }
  std::uint64_t peak_bytes() const { return peak_bytes_.load(); }

 private:
  std::function<void()> give_up_;
  const std::uint64_t limit_bytes_;
  std::atomic<std::uint64_t> used_bytes_{0};
  std::atomic<std::uint64_t> peak_bytes_{0};
};

}  // namespace trunkline
