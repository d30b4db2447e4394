#include "cli/bench/schedule.h"

#include <algorithm>
#include <bit>

namespace trunkline::cli {
namespace {

std::uint64_t scramble(std::uint64_t value) {  // the finaliser of MurmurHash3
  value = (value ^ (value >> 33)) * 0xff51'afd7'ed55'8ccd;
  value = (value ^ (value >> 33)) * 0xc4ce'b9fe'1a85'ec53;
  return value ^ (value >> 33);
}

}  // namespace

Permutation::Permutation(std::uint64_t count, std::uint64_t seed)
    : count_(count), seed_(seed), half_bits_((static_cast<unsigned>(std::bit_width(count - 1)) + 1) / 2) {}

std::uint64_t Permutation::operator()(std::uint64_t index) const {
  constexpr unsigned kRounds = 4;
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  do {
    std::uint64_t left = index >> half_bits_;
    std::uint64_t right = index & mask;
    for (unsigned round = 0; round < kRounds; ++round) {
      const std::uint64_t mixed = left ^ (scramble(right + seed_ + (std::uint64_t{round} << 60)) & mask);
      left = right;
      right = mixed;
    }
    index = (left << half_bits_) | right;
  } while (index >= count_);  // at most four times as many positions as indices, so this takes few steps
  return index;
}

Schedule::Schedule(std::uint64_t file_bytes, std::uint64_t piece_bytes, Order order, std::uint64_t seed,
                   bool endless)
    : file_bytes_(file_bytes),
      piece_bytes_(piece_bytes),
      pieces_((file_bytes + piece_bytes - 1) / piece_bytes),
      order_(order),
      seed_(seed),
      endless_(endless),
      permutation_(std::max<std::uint64_t>(pieces_, 1), seed) {}

void Schedule::restrict_to(std::uint64_t first, std::uint64_t count) {
  if (pieces_ > 0) next_ = first % pieces_;
  left_ = count;
}

std::optional<Piece> Schedule::next() {
  if (pieces_ == 0 || left_ == 0U) return std::nullopt;
  if (next_ == pieces_) {
    if (!endless_) return std::nullopt;
    next_ = 0;
    permutation_ = Permutation(pieces_, ++seed_);
  }
  const std::uint64_t index = order_ == Order::random ? permutation_(next_) : next_;
  ++next_;
  if (left_) --*left_;
  const std::uint64_t offset = index * piece_bytes_;
  return Piece{.offset = offset, .bytes = std::min(piece_bytes_, file_bytes_ - offset)};
}

}  // namespace trunkline::cli
