#include "cli/bench/schedule.h"

#include <algorithm>

namespace trunkline::cli {
namespace {

std::uint64_t scramble(std::uint64_t value) {  // the finaliser of MurmurHash3
  value = (value ^ (value >> 33)) * 0xff51'afd7'ed55'8ccd;
  value = (value ^ (value >> 33)) * 0xc4ce'b9fe'1a85'ec53;
  return value ^ (value >> 33);
}

}  // namespace

Op mixed_op(unsigned read_percent, std::uint64_t seed, std::uint64_t offset) {
  return scramble(offset + scramble(seed + 1)) % 100 < read_percent ? Op::read : Op::write;
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

void Schedule::vary_sizes(std::uint64_t least_bytes) {
  const std::uint64_t sizes = piece_bytes_ / least_bytes;
  starts_.clear();
  for (std::uint64_t start = 0; start < file_bytes_;) {
    starts_.push_back(start);
    start += least_bytes * (1 + scramble(seed_ ^ scramble(starts_.size())) % sizes);
  }
  pieces_ = starts_.size();
  permutation_ = records::Permutation(std::max<std::uint64_t>(pieces_, 1), seed_);
}

Piece Schedule::piece_at(std::uint64_t index) const {
  if (starts_.empty()) {
    const std::uint64_t offset = index * piece_bytes_;
    return {.offset = offset, .bytes = std::min(piece_bytes_, file_bytes_ - offset)};
  }
  const std::uint64_t end = index + 1 < pieces_ ? starts_[index + 1] : file_bytes_;
  return {.offset = starts_[index], .bytes = end - starts_[index]};
}

std::optional<Piece> Schedule::next() {
  if (pieces_ == 0 || left_ == 0U) return std::nullopt;
  if (next_ == pieces_) {
    if (!endless_) return std::nullopt;
    next_ = 0;
    permutation_ = records::Permutation(pieces_, ++seed_);
  }
  const std::uint64_t index = order_ == Order::random ? permutation_(next_) : next_;
  ++next_;
  if (left_) --*left_;
  Piece piece = piece_at(index);
  if (read_percent_) piece.op = mixed_op(*read_percent_, seed_, piece.offset);
  return piece;
}

}  // namespace trunkline::cli
