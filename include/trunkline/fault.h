// Faults injected at completions: how this library is tested, and how users can test what they build on it.
#pragma once

#include <cstdint>
#include <memory>

namespace trunkline {

enum class Op { read, write, sync };

// A plan of faults, shared by all lanes of the engine that was created with it. Commands of each Op are
// counted from 0 in the order in which lanes send them (resuming or retrying a transfer sends another
// command). Thread-safe.
class Faults {
 public:
  static std::shared_ptr<Faults> create();
  virtual ~Faults() = default;

  // Commands first .. first + count - 1 of `op` fail with errno `code` and move nothing.
  virtual void fail(Op op, std::uint64_t first, int code, std::uint64_t count = 1) = 0;

  // The same commands move at most `bytes` bytes (0: a zero result, as at the end of a file).
  virtual void shorten(Op op, std::uint64_t first, std::uint64_t bytes, std::uint64_t count = 1) = 0;

  // The same commands complete only after release().
  virtual void hold(Op op, std::uint64_t first, std::uint64_t count = 1) = 0;
  virtual void release() = 0;

  // Every command fails with EINTR or EAGAIN, or is cut short at a random place, with these probabilities;
  // completions are shuffled. A correct engine produces the same result as without.
  virtual void disturb(std::uint64_t seed, double interrupt_rate, double short_rate) = 0;

  virtual std::uint64_t commands(Op op) const = 0;  // sent so far
  virtual std::uint64_t injected() const = 0;       // faults that took effect so far
};

}  // namespace trunkline
