#include "records/permutation.h"

#include <algorithm>
#include <bit>

namespace trunkline::records {
namespace {

// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15U;

std::uint64_t mask_of(unsigned bits) { return (std::uint64_t{1} << bits) - 1; }

}  // namespace

std::uint64_t mix_key(std::uint64_t seed, std::uint64_t number) {
  return mix(mix(seed + kGolden) + (number + 1) * kGolden);
}

Permutation::Permutation(std::uint64_t count, std::uint64_t key) : count_(count) {
  // Halves of at least one bit: a network over a single bit could not swap anything.
  const unsigned bits = std::max(2U, count > 1 ? static_cast<unsigned>(std::bit_width(count - 1)) : 0U);
  low_bits_ = bits / 2;
  high_bits_ = bits - low_bits_;
  for (unsigned round = 0; round < kRounds; ++round) keys_[round] = mix_key(key, round);
}

// Rounds change the halves in turn, each by a function of the other: what each does can be undone, whatever
// the function is, so that the whole is a bijection.
std::uint64_t Permutation::encrypt(std::uint64_t value) const {
  std::uint64_t low = value & mask_of(low_bits_);
  std::uint64_t high = value >> low_bits_;
  for (unsigned round = 0; round < kRounds; round += 2) {
    low ^= mix(high + keys_[round]) & mask_of(low_bits_);
    high ^= mix(low + keys_[round + 1]) & mask_of(high_bits_);
  }
  return high << low_bits_ | low;
}

}  // namespace trunkline::records
