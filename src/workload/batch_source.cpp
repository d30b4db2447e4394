#include "workload/batch_source.h"

#include <utility>

namespace trunkline::workload {

Result<SourceBatch> ReaderSource::next(std::chrono::nanoseconds timeout) {
  auto batch = reader_->next(timeout);
  if (!batch) return std::unexpected(batch.error());
  std::optional<records::Batch> read = std::move(*batch);
  if (!read) return std::unexpected(make_error(ErrorKind::closed, "the reader of batches has ended"));
  std::uint64_t bytes = 0;
  for (const records::PlacedRange& range : read->ranges) bytes += range.length;
  return SourceBatch{.units = std::move(read->samples), .bytes = bytes, .memory = std::move(read->lease)};
}

Result<SourceBatch> NullSource::next(std::chrono::nanoseconds /*timeout*/) {
  const records::Step step = order_.step(order_.normalized(cursor_));
  cursor_ = step.end;
  return SourceBatch{.units = order_.samples_of(step)};
}

}  // namespace trunkline::workload
