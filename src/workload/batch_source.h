// Where the batches of an emulated training come from.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "records/batch_reader.h"
#include "records/sample_order.h"
#include "trunkline/error.h"

namespace trunkline::workload {

struct SourceBatch {
  std::vector<std::uint64_t> units;         // what was read as a whole: samples, or row groups of many
  std::uint64_t bytes = 0;                  // of samples
  std::shared_ptr<const void> memory = {};  // occupied as long as it is held
};

class BatchSource {
 public:
  virtual ~BatchSource() = default;
  // The next batch; `timed_out` after the timeout. There is always a next one.
  virtual Result<SourceBatch> next(std::chrono::nanoseconds timeout) = 0;
  // Ends reading. False where a thread goes on, in a system call that does not return.
  virtual bool close() { return true; }
};

// Reads ahead, as trunkline.data's Loader does.
class ReaderSource final : public BatchSource {
 public:
  explicit ReaderSource(std::unique_ptr<records::BatchReader> reader) : reader_(std::move(reader)) {}
  Result<SourceBatch> next(std::chrono::nanoseconds timeout) override;
  bool close() override { return reader_->close(); }

 private:
  std::unique_ptr<records::BatchReader> reader_;
};

// The same batches from a device that takes no time: nothing is read.
class NullSource final : public BatchSource {
 public:
  explicit NullSource(const records::OrderOptions& order) : order_(order) {}
  Result<SourceBatch> next(std::chrono::nanoseconds timeout) override;

 private:
  records::SampleOrder order_;
  records::OrderCursor cursor_;
};

}  // namespace trunkline::workload
