// The decorator that injects faults into any backend, and the plan that it follows.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include "io/backends/backend.h"
#include "trunkline/fault.h"

namespace trunkline::io {

// What happens to one command.
struct Fault {
  int code = 0;                        // fails with this errno value, unless 0
  std::optional<std::uint64_t> bytes;  // moves at most this many
  bool hold = false;                   // completes only after release()
};

class FaultPlan final : public Faults, public std::enable_shared_from_this<FaultPlan> {
 public:
  void fail(Op op, std::uint64_t first, int code, std::uint64_t count) override;
  void shorten(Op op, std::uint64_t first, std::uint64_t bytes, std::uint64_t count) override;
  void hold(Op op, std::uint64_t first, std::uint64_t count) override;
  void release() override;
  void disturb(std::uint64_t seed, double interrupt_rate, double short_rate) override;
  std::uint64_t commands(Op op) const override;
  std::uint64_t injected() const override;

  // Counts the command, and returns what should happen to it.
  Fault next(const Command& command);

  // Whether held commands must still wait. wait_released() blocks until they need not.
  bool holding() const { return holding_.load(); }
  void wait_released();

  // A random number below `bound` for shuffling; nullopt when not disturbing.
  std::optional<std::uint64_t> shuffle(std::uint64_t bound);

  std::unique_ptr<Backend> decorate(std::unique_ptr<Backend> inner);

  void add_sleeper(Backend* backend);
  void remove_sleeper(Backend* backend);

 private:
  struct Rule {
    Op op;
    std::uint64_t first;
    std::uint64_t count;
    Fault fault;
  };
  void add(const Rule& rule);

  mutable std::mutex mutex_;
  std::condition_variable released_;
  std::vector<Rule> rules_;
  std::array<std::uint64_t, 3> commands_{};
  std::uint64_t injected_ = 0;
  std::atomic<bool> holding_{false};
  bool disturbing_ = false;
  double interrupt_rate_ = 0;
  double short_rate_ = 0;
  std::mt19937_64 random_;
  std::vector<Backend*> sleepers_;  // woken by release()
};

// How `fault` changes a command before it is sent: returns the command to run, or nullopt when it must not
// run at all.
std::optional<Command> under_fault(Command command, const Fault& fault);

// How `fault` changes the result. What a shortened read moved but does not report is overwritten, so that
// code that relies on it is exposed.
std::int64_t result_under_fault(const Command& command, const Fault& fault, std::int64_t result);

}  // namespace trunkline::io
