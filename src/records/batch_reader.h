// Reads a training's batches ahead.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "records/batch_memory.h"
#include "records/sample_order.h"
#include "records/sample_reader.h"

namespace trunkline::records {

struct BatchReaderOptions {
  OrderOptions order;
  OrderCursor begin = {};
  // Buffers: batches that exist at a time, with those that the caller holds. At least 2, so that one is read
  // while the caller holds another.
  unsigned slots = 2;
  SampleReaderOptions reading = {};
  // Where several readers share the batches of a rank, one after another: this is number `share` of `shares`.
  std::uint64_t shares = 1;
  std::uint64_t share = 0;
  bool one_epoch = false;                     // end after the epoch of `begin`; else go on with the next one
  std::optional<unsigned> cuda_ordinal = {};  // the GPU that batches will be copied to
};

struct Batch {
  std::vector<std::uint64_t> samples;
  std::vector<PlacedRange> ranges;  // ranges_per_sample of each sample
  std::vector<SkippedSample> skipped;
  std::span<std::byte> memory;
  BatchMemory::Lease lease;  // of the memory; null if there are no samples
  Step step;
};

// The next batches are in flight, or wait to be taken, in as many slots as the caller leaves free. A thread
// of its own opens files and submits reads. next() is for one thread at a time; the others are thread-safe.
class BatchReader {
 public:
  // Options are valid (see SampleOrder), and epochs have a step.
  BatchReader(const Engine& engine, std::shared_ptr<const SampleTable> table, std::optional<Volume> volume,
              BatchReaderOptions options);
  BatchReader(const BatchReader&) = delete;
  BatchReader& operator=(const BatchReader&) = delete;
  ~BatchReader();

  // The next batch; nullopt after the last one of `one_epoch`. timed_out after the timeout: what was begun
  // goes on. `closed` once the reader is closed. Any other error is that of the batch that would be next, and
  // stays: no later batch is returned.
  Result<std::optional<Batch>> next(Future::Timeout timeout);
  // Whether the caller holds so many batches that no other one can be read.
  bool all_slots_held() const;

  // Cancels what is in flight and ends the thread. Batches that the caller holds stay valid. False where the
  // thread goes on, in a system call that does not return: it keeps what it uses. Idempotent.
  bool close();

 private:
  struct Shared;

  static std::unique_ptr<std::jthread> start_thread(const std::shared_ptr<Shared>& shared);

  std::shared_ptr<Shared> shared_;
  std::unique_ptr<std::jthread> thread_;
};

}  // namespace trunkline::records
