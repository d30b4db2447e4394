// The order in which the pieces of one file are transferred.
#pragma once

#include <cstdint>
#include <optional>

namespace trunkline::cli {

struct Piece {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// A permutation of 0 .. count - 1 that needs no memory: a Feistel network over the next power of four,
// iterated until it falls inside the range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
// CT-RSA 2002).
class Permutation {
 public:
  Permutation(std::uint64_t count, std::uint64_t seed);  // count > 0
  std::uint64_t operator()(std::uint64_t index) const;   // index < count

 private:
  std::uint64_t count_;
  std::uint64_t seed_;
  unsigned half_bits_;
};

enum class Order { sequential, random };

// Covers a file in pieces of one size (the last may be shorter), each exactly once per pass. Not
// synchronised.
class Schedule {
 public:
  // `endless`: passes follow each other; random passes differ in their order.
  Schedule(std::uint64_t file_bytes, std::uint64_t piece_bytes, Order order, std::uint64_t seed,
           bool endless);

  // Restricts it to `count` pieces, from the one with this index in the pass (modulo their number) on.
  void restrict_to(std::uint64_t first, std::uint64_t count);

  std::optional<Piece> next();  // nullopt at the end of a single pass, and for an empty file

 private:
  std::uint64_t file_bytes_;
  std::uint64_t piece_bytes_;
  std::uint64_t pieces_;
  Order order_;
  std::uint64_t seed_;
  bool endless_;
  std::uint64_t next_ = 0;
  std::optional<std::uint64_t> left_;  // pieces; nullopt: not restricted
  Permutation permutation_;
};

}  // namespace trunkline::cli
