// The loop of an emulated training: takes batches from a source, and lets an accelerator compute on them.
//
// For each step:
//  1. Take the batch while the step before it computes: if it is there by the end of that, the next step
//     starts at that very time, however late this thread wakes up.
//  2. With several ranks: meet them. The step starts when the batch of the last one is ready.
//  3. Sleep until the step before it has ended, and release its batch.
// So the thread wakes up once in a step, and what it cannot keep up with shows as a later start.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "trunkline/error.h"
#include "workload/accelerator.h"
#include "workload/batch_source.h"
#include "workload/clock.h"
#include "workload/step_barrier.h"

namespace trunkline::workload {

// Samples that one unit of the source holds. Units are the samples themselves, or row groups of a file.
struct UnitSamples {
  std::uint64_t each = 1;
  std::uint64_t units_per_file = 1;
  std::uint64_t last_in_file = 1;

  std::uint64_t of(std::uint64_t unit) const {
    return unit % units_per_file == units_per_file - 1 ? last_in_file : each;
  }
};

struct TrainingOptions {
  std::uint64_t batch_size = 1;  // samples of one rank in a step
  UnitSamples unit_samples = {};
  double compute_ns = 0;
  double compute_stdev_ns = 0;  // of a normal distribution, without what is below 0
  std::uint64_t seed = 0;
  std::uint64_t skipped_steps = 1;
};

struct TrainingStats {
  AcceleratorStats accelerator;
  std::uint64_t samples = 0;
  std::uint64_t bytes = 0;       // of the samples of batches that steps have begun with
  std::int64_t loop_cpu_ns = 0;  // processor time of the loop's thread
};

// For one thread at a time.
class TrainingLoop {
 public:
  // Without a barrier, this is the only rank.
  TrainingLoop(std::unique_ptr<BatchSource> source, TrainingOptions options, Clock& clock,
               std::unique_ptr<StepBarrier> barrier = nullptr);

  void begin_epoch();
  // Goes on until `steps_of_epoch` steps have begun in this epoch, and returns true once the last of them has
  // ended; false if that takes longer than `limit_ns`: call it again. An error of the source stays.
  Result<bool> advance(std::uint64_t steps_of_epoch, std::int64_t limit_ns);
  // What happens until the next advance() counts nowhere. After an advance() that returned true.
  void pause();

  TrainingStats stats() const;
  std::uint64_t steps() const { return steps_; }  // begun, of all epochs

  // Ends reading, after which the loop cannot go on; see BatchSource::close().
  bool close() { return source_->close(); }

 private:
  enum class Phase { idle, taking, meeting, waiting };

  bool finish_step(std::int64_t limit);
  Result<bool> take(std::int64_t limit);
  Result<bool> meet(std::int64_t limit);
  void start();
  void release_if_ended();
  std::int64_t draw_compute();
  Result<bool> run(std::uint64_t steps_of_epoch, std::int64_t limit);

  struct Taken {
    SourceBatch batch;
    std::uint64_t samples_left;
  };

  const std::unique_ptr<BatchSource> source_;
  const TrainingOptions options_;
  Clock& clock_;
  const std::unique_ptr<StepBarrier> barrier_;
  Accelerator accelerator_;
  std::mt19937_64 random_;

  Phase phase_ = Phase::idle;
  std::uint64_t steps_ = 0;                             // begun
  std::uint64_t steps_of_epoch_ = 0;                    // begun
  std::deque<Taken> taken_;                             // for the next steps
  std::uint64_t samples_taken_ = 0;                     // in taken_
  std::vector<std::shared_ptr<const void>> computing_;  // memory of the step that computes
  std::int64_t asked_ = 0;
  std::int64_t ready_ = 0;
  TrainingStats stats_;
};

}  // namespace trunkline::workload
