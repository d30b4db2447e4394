// Lets a forked child take ownership of its parent's object before the child first uses it.
#pragma once

#include <atomic>
#include <concepts>
#include <thread>

#include "os/fork_generation.h"

namespace trunkline::os {

// Belongs to the process that constructed it, and in a forked child to the child after its first take_over().
// Thread-safe.
class ForkTakeover {
 public:
  // Runs `renew` in the first call of each forked child; other threads of the child wait until it is done.
  // `renew` repairs what the parent's threads, which the child does not have, left behind: locks that they
  // held, counts of operations in flight. It must not throw.
  template <std::invocable Renew>
  void take_over(Renew&& renew) {
    const unsigned now = fork_generation();
    for (unsigned known = generation_.load(); known != now;) {
      if (known == (now | kUnderWay)) {
        std::this_thread::yield();
        known = generation_.load();
      } else if (generation_.compare_exchange_weak(known, now | kUnderWay)) {
        renew();
        generation_.store(now);
        return;
      }
    }
  }

 private:
  // Added to the child's generation while `renew` runs.
  static constexpr unsigned kUnderWay = 1U << 31;

  std::atomic<unsigned> generation_{fork_generation()};
};

}  // namespace trunkline::os
