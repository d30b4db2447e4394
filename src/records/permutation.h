// A random order of the numbers below N that needs no list.
#pragma once

#include <array>
#include <cstdint>

namespace trunkline::records {

// Mixes a seed with further numbers (epoch, window): each result is independent of those for other numbers.
std::uint64_t mix_key(std::uint64_t seed, std::uint64_t number);

// A bijection of 0 .. count - 1, chosen by a key: a Feistel network over the next power of two, walked until
// it is below `count` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Constant
// memory; fewer than two walks on average. Its results are part of the saved state of a loader: they never
// change.
class Permutation {
 public:
  Permutation(std::uint64_t count, std::uint64_t key);

  std::uint64_t count() const { return count_; }

  // `position` < count.
  std::uint64_t operator()(std::uint64_t position) const {
    std::uint64_t value = position;
    do value = encrypt(value);
    while (value >= count_);
    return value;
  }

 private:
  static constexpr unsigned kRounds = 8;

  std::uint64_t encrypt(std::uint64_t value) const;

  std::uint64_t count_;
  unsigned low_bits_;   // of the right half
  unsigned high_bits_;  // of the left half
  std::array<std::uint64_t, kRounds> keys_{};
};

}  // namespace trunkline::records
