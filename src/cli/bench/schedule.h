// The order in which the pieces of one file are transferred.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "records/permutation.h"
#include "trunkline/engine.h"

namespace trunkline::cli {

struct Piece {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::optional<Op> op{};  // where reads and writes are mixed
};

enum class Order { sequential, random };

// What happens to the piece at `offset` in a pass with this seed, of which about `read_percent` is read.
Op mixed_op(unsigned read_percent, std::uint64_t seed, std::uint64_t offset);

// Covers a file in pieces of one size, or of sizes chosen at random (the last may be shorter), each exactly
// once per pass. Not synchronised.
class Schedule {
 public:
  // `endless`: passes follow each other; random passes differ in their order.
  Schedule(std::uint64_t file_bytes, std::uint64_t piece_bytes, Order order, std::uint64_t seed,
           bool endless);

  // Restricts it to `count` pieces, from the one with this index in the pass (modulo their number) on.
  void restrict_to(std::uint64_t first, std::uint64_t count);

  // Pieces of `least_bytes` times 1, 2, ... up to the size of a piece, each as likely: like fio's bsrange.
  // Keeps 8 bytes of memory for each piece of the file.
  void vary_sizes(std::uint64_t least_bytes);

  // About this share of the pieces is read, the others are written: like fio's rwmixread. Which ones depends
  // on the seed and the pass.
  void mix(unsigned read_percent) { read_percent_ = read_percent; }

  std::optional<Piece> next();  // nullopt at the end of a single pass, and for an empty file

 private:
  Piece piece_at(std::uint64_t index) const;

  std::uint64_t file_bytes_;
  std::uint64_t piece_bytes_;
  std::uint64_t pieces_;
  Order order_;
  std::uint64_t seed_;
  bool endless_;
  std::uint64_t next_ = 0;
  std::optional<std::uint64_t> left_;  // pieces; nullopt: not restricted
  records::Permutation permutation_;
  std::vector<std::uint64_t> starts_;  // of pieces of various sizes
  std::optional<unsigned> read_percent_;
};

}  // namespace trunkline::cli
