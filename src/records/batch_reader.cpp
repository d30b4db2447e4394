#include "records/batch_reader.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/trace.h"
#include "io/engine_core.h"
#include "io/submission.h"
#include "os/signals_blocked.h"

namespace trunkline::records {
namespace {

constexpr trace::Kind kBatchWait{"wait for a batch", trace::Category::wait};
constexpr trace::Kind kBatchPlan{"plan a batch", trace::Category::operation};
constexpr trace::Kind kGroupsRead{"read a batch with many files", trace::Category::operation};

// How often a wait of the thread looks whether it is still wanted.
constexpr std::chrono::milliseconds kSlice{50};
// How long close() waits for the thread and for reads in flight, which may never end on a device that hangs.
constexpr std::chrono::seconds kCloseTimeout{5};

Error cancelled_error() { return make_error(ErrorKind::cancelled, "reading a batch was cancelled"); }

// A batch that is being read, or its error.
struct Reading {
  Step step;
  BatchPlan plan = {};
  std::span<std::byte> memory = {};
  BatchMemory::Lease lease = {};
  Future future = {};  // not valid where there is nothing to read
  bool is_finished = false;
  std::optional<Error> error = {};
};

SampleReaderOptions reading_options(const BatchReaderOptions& options) {
  SampleReaderOptions reading = options.reading;
  reading.batches = options.slots;
  return reading;
}

}  // namespace

// What the thread and the caller share; the thread keeps it alive.
struct BatchReader::Shared {
  Shared(const Engine& engine_in, std::shared_ptr<const SampleTable> table, std::optional<Volume> volume,
         const BatchReaderOptions& options_in)
      : engine(engine_in),
        options(options_in),
        order(options_in.order),
        reader(engine_in, std::move(table), std::move(volume), reading_options(options_in)),
        memory(BatchMemory::create(engine_in, options_in.slots, options_in.cuda_ordinal)) {}

  void run();
  Reading begin(const Step& step, BatchMemory::Lease lease);
  Reading begin_in_groups(const Step& step, std::span<const std::uint64_t> samples, BatchMemory::Lease lease);
  Result<Future> submit(const Request& request) const;
  bool is_stopped() const;
  bool push(Reading reading);

  const Engine engine;
  const BatchReaderOptions options;
  const SampleOrder order;
  SampleReader reader;  // of the thread; finish() of the caller
  const std::shared_ptr<BatchMemory> memory;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<Reading> readings;
  std::optional<Reading> current;  // that next() has begun to wait for
  std::optional<Error> failure;    // of the last batch, after which there is none
  bool is_waiting_for_slot = false;
  bool stopped = false;
  bool ended = false;  // the thread
};

void BatchReader::Shared::run() {
  pthread_setname_np(pthread_self(), "trunkline-data");
  trace::name_this_thread("trunkline-data", trace::Role::thread);
  OrderCursor cursor = order.normalized(options.begin);
  const std::uint64_t epoch = cursor.epoch;
  for (std::uint64_t number = 0; !options.one_epoch || cursor.epoch == epoch; ++number) {
    const Step step = order.step(cursor);
    cursor = step.end;
    if (number % options.shares != options.share) continue;
    {
      const std::scoped_lock lock(mutex);
      is_waiting_for_slot = true;
    }
    BatchMemory::Lease lease = memory->acquire();
    {
      const std::scoped_lock lock(mutex);
      is_waiting_for_slot = false;
      if (stopped) break;
    }
    Reading reading = begin(step, std::move(lease));
    const bool failed = reading.error.has_value();
    if (!push(std::move(reading)) || failed) break;
  }
  const std::scoped_lock lock(mutex);
  ended = true;
  changed.notify_all();
}

Reading BatchReader::Shared::begin(const Step& step, BatchMemory::Lease lease) {
  const std::vector<std::uint64_t> samples = order.samples_of(step);
  if (reader.has_many_files(samples)) return begin_in_groups(step, samples, std::move(lease));
  const trace::Span span(kBatchPlan);
  Reading reading{.step = step};
  auto plan = reader.plan(samples);
  if (!plan) {
    reading.error = plan.error();
    return reading;
  }
  reading.plan = std::move(*plan);
  if (reading.plan.bytes == 0) return reading;
  auto reserved = lease->reserve(reading.plan.bytes);
  if (!reserved) {
    reading.error = reserved.error();
    return reading;
  }
  reading.memory = *reserved;
  reading.lease = std::move(lease);
  // The operation keeps the memory until no device writes into it any more.
  auto future = submit(SampleReader::request(reading.plan, reading.memory, reading.lease));
  if (future)
    reading.future = std::move(*future);
  else
    reading.error = future.error();
  return reading;
}

Reading BatchReader::Shared::begin_in_groups(const Step& step, std::span<const std::uint64_t> samples,
                                             BatchMemory::Lease lease) {
  const trace::Span span(kGroupsRead);
  Reading reading{.step = step};
  auto memory_of_batch = lease->reserve(reader.bytes_at_most(samples));
  if (!memory_of_batch) {
    reading.error = memory_of_batch.error();
    return reading;
  }
  reading.memory = *memory_of_batch;
  const auto wait = [this](const Future& future) -> Status {
    while (!future.wait(kSlice)) {
      if (is_stopped()) return std::unexpected(cancelled_error());
    }
    return {};
  };
  auto plan = reader.read_in_groups(
      samples, reading.memory, lease, [this](const Request& request) { return submit(request); }, wait);
  if (!plan) {
    reading.error = plan.error();
    return reading;
  }
  reading.plan = std::move(*plan);
  reading.memory = reading.memory.first(reading.plan.bytes);
  reading.is_finished = true;
  if (!reading.plan.samples.empty()) reading.lease = std::move(lease);
  return reading;
}

bool BatchReader::Shared::is_stopped() const {
  const std::scoped_lock lock(mutex);
  return stopped;
}

// `cancelled` once the reader is stopped.
Result<Future> BatchReader::Shared::submit(const Request& request) const {
  io::Submission submission(engine.core(), {&request, 1});
  while (!submission.advance(kSlice)) {
    if (is_stopped()) return std::unexpected(cancelled_error());
  }
  return submission.take_futures().front();
}

// False once the reader is stopped; then the read is cancelled, and has ended unless the device hangs.
bool BatchReader::Shared::push(Reading reading) {
  {
    const std::scoped_lock lock(mutex);
    if (!stopped) {
      readings.push_back(std::move(reading));
      changed.notify_all();
      return true;
    }
  }
  if (reading.future.valid()) {
    reading.future.cancel();
    reading.future.wait(kCloseTimeout);
  }
  return false;
}

BatchReader::BatchReader(const Engine& engine, std::shared_ptr<const SampleTable> table,
                         std::optional<Volume> volume, BatchReaderOptions options)
    : shared_(std::make_shared<Shared>(engine, std::move(table), std::move(volume), options)),
      thread_(start_thread(shared_)) {}

std::unique_ptr<std::jthread> BatchReader::start_thread(const std::shared_ptr<Shared>& shared) {
  const os::SignalsBlocked blocked;
  return std::make_unique<std::jthread>([shared] { shared->run(); });
}

BatchReader::~BatchReader() { close(); }

bool BatchReader::all_slots_held() const {
  const std::scoped_lock lock(shared_->mutex);
  return shared_->readings.empty() && !shared_->current && shared_->is_waiting_for_slot &&
         !shared_->memory->has_free_slot();
}

Result<std::optional<Batch>> BatchReader::next(Future::Timeout timeout) {
  const trace::Span span(kBatchWait);
  const auto began = std::chrono::steady_clock::now();
  const auto timed_out = [] {
    return std::unexpected(make_error(ErrorKind::timed_out, "the next batch is not there yet"));
  };
  const auto closed = [] {
    return std::unexpected(make_error(ErrorKind::closed, "the reader of batches is closed"));
  };
  Shared& shared = *shared_;
  std::unique_lock lock(shared.mutex);
  const auto is_over = [&] {
    return shared.stopped || shared.failure || shared.current || !shared.readings.empty() || shared.ended;
  };
  const auto fail = [&](const Error& error) {
    const std::scoped_lock failing(shared.mutex);
    shared.failure = error;
    return std::unexpected(error);
  };
  if (timeout && !shared.changed.wait_for(lock, *timeout, is_over)) return timed_out();
  shared.changed.wait(lock, is_over);
  if (shared.stopped) return closed();
  if (shared.failure) return std::unexpected(*shared.failure);
  if (!shared.current) {
    if (shared.readings.empty()) return std::nullopt;
    shared.current = std::move(shared.readings.front());
    shared.readings.pop_front();
  }
  const Future future = shared.current->future;
  if (!shared.current->error && future.valid()) {
    lock.unlock();
    if (timeout) *timeout -= std::min(*timeout, std::chrono::steady_clock::now() - began);
    if (!future.wait(timeout)) return timed_out();
    lock.lock();
    if (shared.stopped) return closed();
  }
  std::optional<Reading> taken = std::exchange(shared.current, std::nullopt);
  lock.unlock();
  if (!taken) return closed();
  Reading reading = std::move(*taken);
  if (reading.error) return fail(*reading.error);
  if (!reading.is_finished) {
    const Result<std::uint64_t> read = future.valid() ? future.result() : Result<std::uint64_t>(0);
    if (auto status = shared.reader.finish(read, reading.memory, reading.plan); !status)
      return fail(status.error());
  }
  return Batch{.samples = std::move(reading.plan.samples),
               .ranges = std::move(reading.plan.ranges),
               .skipped = std::move(reading.plan.skipped),
               .memory = reading.memory,
               .lease = std::move(reading.lease),
               .step = reading.step};
}

bool BatchReader::close() {
  const std::unique_ptr<std::jthread> thread = [&] {
    const std::scoped_lock lock(shared_->mutex);
    return std::move(thread_);
  }();
  if (!thread) {
    const std::scoped_lock lock(shared_->mutex);
    return shared_->ended;
  }
  std::deque<Reading> readings;
  {
    const std::scoped_lock lock(shared_->mutex);
    shared_->stopped = true;
    readings.swap(shared_->readings);
    if (auto current = std::exchange(shared_->current, std::nullopt)) readings.push_back(std::move(*current));
    shared_->changed.notify_all();
  }
  shared_->memory->close();
  for (Reading& reading : readings) {
    if (reading.future.valid()) reading.future.cancel();
  }
  const auto deadline = std::chrono::steady_clock::now() + kCloseTimeout;
  for (Reading& reading : readings) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (reading.future.valid()) reading.future.wait(std::max(left, std::chrono::nanoseconds(0)));
  }
  readings.clear();
  std::unique_lock lock(shared_->mutex);
  const bool ended = shared_->changed.wait_until(lock, deadline, [&] { return shared_->ended; });
  lock.unlock();
  if (!ended) thread->detach();
  return ended;
}

}  // namespace trunkline::records
