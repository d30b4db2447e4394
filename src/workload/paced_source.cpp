#include "workload/paced_source.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>

namespace trunkline::workload {

// When each free buffer was released, the one that waits longest first.
struct PacedSource::Slots {
  std::deque<std::int64_t> released;
};

PacedSource::PacedSource(const records::OrderOptions& order, PacedDevice device, Clock& clock)
    : batches_(order),
      device_(device),
      clock_(clock),
      slots_(std::make_shared<Slots>()),
      delivered_(clock.now()) {
  slots_->released.assign(device.slots, delivered_);
}

Result<SourceBatch> PacedSource::next(std::chrono::nanoseconds timeout) {
  const std::int64_t limit = clock_.now() + timeout.count();
  if (!delivery_) delivery_ = begin();
  const std::int64_t until = delivery_ ? std::min(delivery_->time, limit) : limit;
  while (clock_.now() < until) clock_.sleep_until(until);
  if (!delivery_ || delivery_->time > limit)
    return std::unexpected(make_error(ErrorKind::timed_out, "the batch has not arrived yet"));
  SourceBatch batch = std::move(delivery_->batch);
  delivery_.reset();
  return batch;
}

// The next batch and when it arrives; nullopt if no buffer is free.
std::optional<PacedSource::Delivery> PacedSource::begin() {
  if (slots_->released.empty()) return std::nullopt;
  const std::int64_t start = std::max(delivered_, slots_->released.front());
  slots_->released.pop_front();
  SourceBatch batch = *batches_.next({});
  const double nbytes = static_cast<double>(batch.units.size()) * device_.unit_bytes;
  batch.bytes = static_cast<std::uint64_t>(std::llround(nbytes));
  batch.memory = std::shared_ptr<const void>(
      this, [slots = slots_, &clock = clock_](const void*) { slots->released.push_back(clock.now()); });
  delivered_ = start + std::llround(nbytes / device_.bytes_per_ns);
  return Delivery{.batch = std::move(batch), .time = delivered_};
}

}  // namespace trunkline::workload
