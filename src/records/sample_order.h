// Which samples are in which batch.
//
// The samples of an epoch are in an order that is a function of seed and epoch alone. A step takes the next
// batch_size x ranks positions of that order, a batch for each rank; so the order is the same for any number
// of ranks, and a training can go on at any position with another number of them.
#pragma once

#include <cstdint>
#include <vector>

#include "records/interleaving.h"
#include "records/permutation.h"

namespace trunkline::records {

struct OrderOptions {
  std::uint64_t samples = 0;
  std::uint64_t batch_size = 1;
  std::uint64_t ranks = 1;
  std::uint64_t rank = 0;
  // Samples that stay together: 0: no shuffle; 1: every sample on its own; more: blocks of as many
  // consecutive samples are shuffled.
  std::uint64_t block = 1;
  std::uint64_t seed = 0;
  InterleavingOptions interleaving = {};  // of the order that the shuffle begins with
  bool drop_last = false;                 // leave out a step that has not all of its samples
};

// Where a training is: the position in an epoch's order that comes next.
struct OrderCursor {
  std::uint64_t epoch = 0;
  std::uint64_t position = 0;  // samples of this epoch that all ranks together have got
  bool operator==(const OrderCursor&) const = default;
};

// The order of one epoch.
class EpochOrder {
 public:
  EpochOrder(const OrderOptions& options, std::uint64_t epoch);

  std::uint64_t sample_at(std::uint64_t position) const;

 private:
  std::uint64_t samples_;
  std::uint64_t block_;
  std::uint64_t rotation_;  // blocks begin there, so that the short one is elsewhere in every epoch
  Permutation blocks_;
  Interleaving interleaving_;
};

struct Step {
  OrderCursor begin;
  OrderCursor end = {};     // where the next step begins, which may be in the next epoch
  std::uint64_t first = 0;  // positions of this rank: first .. first + count - 1
  std::uint64_t count = 0;
  bool last = false;  // of its epoch
};

class SampleOrder {
 public:
  // Options are valid: at least one sample, batch_size and ranks at least 1, rank < ranks.
  explicit SampleOrder(const OrderOptions& options) : options_(options) {}

  // In an epoch from its start.
  std::uint64_t steps_per_epoch() const;
  // Where the next step begins: of the next epoch if this one has none left.
  OrderCursor normalized(OrderCursor cursor) const;
  // The step at a cursor. Every rank gets at least one sample in each: where fewer are left than there are
  // ranks, those without one repeat samples of the epoch's begin. Epochs must have a step.
  Step step(OrderCursor cursor) const;
  // The samples of this rank.
  std::vector<std::uint64_t> samples_of(const Step& step) const;

 private:
  OrderOptions options_;
};

}  // namespace trunkline::records
