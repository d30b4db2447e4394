#include "cli/bench/transfer_ring.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "cli/interrupt.h"

namespace trunkline::cli {
namespace {

constexpr std::chrono::milliseconds kTick{
    200};  // interval of progress reports, and how quickly an interrupt is noticed

}  // namespace

struct TransferRing::Batch {
  std::size_t file = 0;
  std::uint64_t first_slot = 0;
  std::uint64_t slots = 0;
  std::vector<Piece> pieces;
  std::vector<Future> futures;
  std::atomic<std::size_t> pending{0};
  Clock::time_point done_at;
};

// Completed batches, passed from the engine's threads to the submitting one.
class TransferRing::Arrivals {
 public:
  void push(Batch* batch) {
    const auto now = Clock::now();
    const std::scoped_lock lock(mutex_);
    batch->done_at = now;
    batches_.push_back(batch);
    arrived_.notify_one();
  }

  std::vector<Batch*> take(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    arrived_.wait_for(lock, timeout, [this] { return !batches_.empty(); });
    return std::exchange(batches_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<Batch*> batches_;
};

TransferRing::TransferRing(const Engine& engine, RingMemory memory)
    : engine_(engine), memory_(std::move(memory)), arrivals_(std::make_unique<Arrivals>()) {}

TransferRing::~TransferRing() = default;

Result<std::unique_ptr<TransferRing>> TransferRing::create(const Engine& engine, const RingShape& shape,
                                                           MemoryKind kind, Device* device,
                                                           std::size_t files) {
  const std::uint64_t batches = shape.batches_per_file * files;
  auto memory = RingMemory::allocate(engine, kind, device, batches * shape.pieces, shape.piece_bytes);
  if (!memory) return std::unexpected(memory.error());
  std::unique_ptr<TransferRing> ring(new TransferRing(engine, std::move(*memory)));
  ring->add_batches(shape, files);
  return ring;
}

std::unique_ptr<TransferRing> TransferRing::create(const Engine& engine, const RingShape& shape,
                                                   std::span<std::byte> memory, std::size_t files) {
  std::unique_ptr<TransferRing> ring(new TransferRing(engine, RingMemory::over(memory, shape.piece_bytes)));
  ring->add_batches(shape, files);
  return ring;
}

void TransferRing::add_batches(const RingShape& shape, std::size_t files) {
  for (std::uint64_t index = 0; index < shape.batches_per_file * files; ++index) {
    auto batch = std::make_unique<Batch>();
    batch->file = index % files;
    batch->first_slot = index * shape.pieces;
    batch->slots = shape.pieces;
    batches_.push_back(std::move(batch));
  }
}

// Assigns the batch its next pieces and generates their content; false when the file has none left.
Result<bool> TransferRing::load(const TransferWork& work, Batch& batch) {
  batch.pieces.clear();
  while (batch.pieces.size() < batch.slots) {
    const auto piece = work.schedules[batch.file].next();
    if (!piece) break;
    if (work.content.make) {
      const std::uint64_t slot = batch.first_slot + batch.pieces.size();
      work.content.make(batch.file, *piece, memory_.begin_filling(slot, piece->bytes));
      if (auto status = memory_.filled(slot, piece->bytes); !status) return std::unexpected(status.error());
    }
    batch.pieces.push_back(*piece);
  }
  return !batch.pieces.empty();
}

void TransferRing::submit(const TransferWork& work, Batch& batch) {
  std::vector<Request> requests;
  requests.reserve(batch.pieces.size());
  for (std::size_t index = 0; index < batch.pieces.size(); ++index) {
    requests.push_back({.op = batch.pieces[index].op.value_or(work.op),
                        .file = &work.files[batch.file],
                        .memory = memory_.slot(batch.first_slot + index, batch.pieces[index].bytes),
                        .offset = batch.pieces[index].offset,
                        .keepalive = {}});
  }
  batch.pending.store(requests.size());
  ++outstanding_;
  batch.futures = engine_.submit(requests);
  for (Future& future : batch.futures) {
    future.on_done([target = &batch, arrivals = arrivals_.get()] {
      if (target->pending.fetch_sub(1) == 1) arrivals->push(target);
    });
  }
}

// Collects the results of a completed batch: checks all of them, and returns the first error.
Status TransferRing::collect(const TransferWork& work, Batch& batch, Moved& moved) {
  Status status;
  for (std::size_t index = 0; index < batch.futures.size(); ++index) {
    const auto bytes = batch.futures[index].result();
    if (bytes) {
      moved.bytes += *bytes;
      if (batch.pieces[index].op.value_or(work.op) == Op::read) moved.bytes_read += *bytes;
      moved.file_bytes[batch.file] += *bytes;
    } else if (status) {
      status = std::unexpected(bytes.error());
    }
  }
  batch.futures.clear();
  moved.last_completion = std::max(moved.last_completion, batch.done_at);
  last_of_file_[batch.file] = std::max(last_of_file_[batch.file], batch.done_at);
  return status;
}

Status TransferRing::check(const TransferWork& work, const Batch& batch) {
  if (!work.content.check) return {};
  for (std::size_t index = 0; index < batch.pieces.size(); ++index) {
    const Piece& piece = batch.pieces[index];
    const auto contents = memory_.contents(batch.first_slot + index, piece.bytes);
    if (!contents) return std::unexpected(contents.error());
    if (auto status = work.content.check(batch.file, piece, *contents); !status) return status;
  }
  return {};
}

void TransferRing::show_progress(const TransferWork& work, const Moved& moved) {
  const auto now = Clock::now();
  if (!work.on_progress || now < next_tick_) return;
  next_tick_ = now + kTick;
  std::uint64_t under_way = 0;
  for (const auto& batch : batches_) {
    for (const Future& future : batch->futures) under_way += future.bytes_done();
  }
  work.on_progress(moved.bytes + under_way);
}

// Waits until nothing is outstanding, so that no future's callback can run later. `arrived` may submit again.
// After the first error, or an interrupt, the rest is cancelled.
Status TransferRing::await_arrivals(const TransferWork& work, Moved& moved,
                                    const std::function<Status(Batch&)>& arrived) {
  Status status;
  const auto stop_with = [&](Error error) {
    status = std::unexpected(std::move(error));
    for (const auto& batch : batches_) {
      for (Future& future : batch->futures) future.cancel();
    }
  };
  while (outstanding_ > 0) {
    if (status && interrupted()) stop_with(make_error(ErrorKind::cancelled, "interrupted"));
    for (Batch* batch : arrivals_->take(kTick)) {
      --outstanding_;
      auto collected = collect(work, *batch, moved);
      if (!status) continue;
      if (collected) collected = arrived(*batch);
      if (!collected) stop_with(std::move(collected.error()));
    }
    show_progress(work, moved);
  }
  return status;
}

void TransferRing::start(const TransferWork& work, Moved& moved) {
  if (work.meter != nullptr) work.meter->start();
  moved.last_completion = Clock::now();
  last_of_file_.assign(work.files.size(), moved.last_completion);
  started_ = moved.last_completion;
}

void TransferRing::stop(const TransferWork& work, Moved& moved) {
  if (work.meter != nullptr) work.meter->stop(moved.last_completion);
  for (std::size_t file = 0; file < last_of_file_.size(); ++file) {
    moved.file_seconds[file] += seconds_between(started_, last_of_file_[file]);
  }
}

Status TransferRing::circulate(const TransferWork& work, Moved& moved) {
  const auto refill = [&](Batch& batch) -> Status {
    const bool late = work.duration_s > 0 && seconds_between(started_, Clock::now()) >= work.duration_s;
    if (late) return {};
    const auto loaded = load(work, batch);
    if (!loaded) return std::unexpected(loaded.error());
    if (*loaded) submit(work, batch);
    return {};
  };
  start(work, moved);
  Status filled;
  for (const auto& batch : batches_) {
    if (filled) filled = refill(*batch);
  }
  auto status = await_arrivals(work, moved, [&](Batch& batch) -> Status {
    if (!filled) return filled;
    auto checked = check(work, batch);
    return checked ? refill(batch) : checked;
  });
  stop(work, moved);
  return filled ? status : filled;
}

// Fills the ring once; content is generated before and checked after the transfers.
Status TransferRing::lap(const TransferWork& work, Moved& moved) {
  std::vector<Batch*> loaded;
  for (const auto& batch : batches_) {
    if (interrupted()) return std::unexpected(make_error(ErrorKind::cancelled, "interrupted"));
    const auto any = load(work, *batch);
    if (!any) return std::unexpected(any.error());
    if (*any) loaded.push_back(batch.get());
  }
  if (loaded.empty()) return {};
  start(work, moved);
  for (Batch* batch : loaded) submit(work, *batch);
  auto status = await_arrivals(work, moved, [](Batch&) -> Status { return {}; });
  stop(work, moved);
  for (const Batch* batch : loaded) {
    if (status) status = check(work, *batch);
  }
  return status;
}

Result<Moved> TransferRing::run(const TransferWork& work) {
  Moved moved;
  moved.file_bytes.resize(work.files.size());
  moved.file_seconds.resize(work.files.size());
  Status status;
  if (work.content_apart) {
    std::uint64_t before = 0;
    do {
      before = moved.bytes;
      status = lap(work, moved);
    } while (status && moved.bytes > before);
  } else {
    status = circulate(work, moved);
  }
  if (!status) return std::unexpected(status.error());
  if (work.on_progress) work.on_progress(moved.bytes);
  return moved;
}

}  // namespace trunkline::cli
