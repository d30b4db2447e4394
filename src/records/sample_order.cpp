#include "records/sample_order.h"

#include <algorithm>

namespace trunkline::records {
namespace {

// Distinguish what the numbers of a seed are used for.
constexpr std::uint64_t kOrderKey = 1;
constexpr std::uint64_t kRotationKey = 2;

std::uint64_t epoch_key(const OrderOptions& options, std::uint64_t epoch, std::uint64_t use) {
  return mix_key(mix_key(options.seed, use), epoch);
}

}  // namespace

EpochOrder::EpochOrder(const OrderOptions& options, std::uint64_t epoch)
    : samples_(options.samples),
      block_(std::min(options.block, options.samples)),
      rotation_(block_ > 1 ? epoch_key(options, epoch, kRotationKey) % options.samples : 0),
      blocks_(block_ > 0 ? options.samples / block_ : 0, epoch_key(options, epoch, kOrderKey)),
      interleaving_(options.interleaving, options.samples) {}

std::uint64_t EpochOrder::sample_at(std::uint64_t position) const {
  const std::uint64_t place = interleaving_(position);
  if (block_ == 0) return place;
  if (block_ == 1) return blocks_(place);
  const std::uint64_t block = place / block_;
  const std::uint64_t within = place % block_;
  // The samples after the last whole block come last.
  const std::uint64_t from = block < blocks_.count() ? blocks_(block) : block;
  const std::uint64_t sample = from * block_ + within;
  return sample < samples_ - rotation_ ? sample + rotation_ : sample - (samples_ - rotation_);
}

std::uint64_t SampleOrder::steps_per_epoch() const {
  const std::uint64_t step = options_.batch_size * options_.ranks;
  return options_.samples / step + (options_.drop_last || options_.samples % step == 0 ? 0 : 1);
}

OrderCursor SampleOrder::normalized(OrderCursor cursor) const {
  const std::uint64_t left = options_.samples - std::min(cursor.position, options_.samples);
  const std::uint64_t wanted = options_.drop_last ? options_.batch_size * options_.ranks : 1;
  return left < wanted ? OrderCursor{cursor.epoch + 1, 0} : cursor;
}

Step SampleOrder::step(OrderCursor cursor) const {
  Step step{.begin = normalized(cursor)};
  const std::uint64_t left = options_.samples - step.begin.position;
  const std::uint64_t taken = std::min(options_.batch_size * options_.ranks, left);
  // Shares that differ by one sample at most; of a whole step they are all the same.
  const std::uint64_t share = taken / options_.ranks;
  const std::uint64_t longer = taken % options_.ranks;
  step.first = step.begin.position + options_.rank * share + std::min(options_.rank, longer);
  step.count = share + (options_.rank < longer ? 1 : 0);
  if (step.count == 0) {
    step.first = (options_.rank - longer) % options_.samples;
    step.count = 1;
  }
  step.end = normalized({step.begin.epoch, step.begin.position + taken});
  step.last = step.end.epoch != step.begin.epoch;
  return step;
}

std::vector<std::uint64_t> SampleOrder::samples_of(const Step& step) const {
  const EpochOrder order(options_, step.begin.epoch);
  std::vector<std::uint64_t> samples(step.count);
  for (std::uint64_t index = 0; index < step.count; ++index)
    samples[index] = order.sample_at(step.first + index);
  return samples;
}

}  // namespace trunkline::records
