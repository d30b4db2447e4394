// Keeps an engine busy with the transfers of several files, the way a program that streams data would.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cli/bench/meter.h"
#include "cli/bench/ring_memory.h"
#include "cli/bench/ring_shape.h"
#include "cli/bench/schedule.h"
#include "trunkline/file.h"

namespace trunkline::cli {

// What to do with a request's memory besides transferring it. Either function may be empty.
struct Content {
  std::function<void(std::size_t file, const Piece&, std::span<std::byte>)> make;  // before it is submitted
  std::function<Status(std::size_t file, const Piece&, std::span<const std::byte>)>
      check;  // after it completed
};

struct TransferWork {
  Op op = Op::read;  // of pieces that name none
  std::span<const File> files;
  std::span<Schedule> schedules;  // one per file
  Content content{};
  // Content is generated before the clock starts and checked after it stopped: the ring works in laps, so
  // that only transfers are measured.
  bool content_apart = false;
  double duration_s = 0;  // > 0: submission stops once the transfers took that long
  Meter* meter = nullptr;
  std::function<void(std::uint64_t bytes_done)> on_progress{};  // a few times a second, and at the end
};

struct Moved {
  std::uint64_t bytes = 0;
  std::uint64_t bytes_read = 0;
  std::vector<std::uint64_t> file_bytes;
  std::vector<double> file_seconds;  // until the last completion of each file
  Clock::time_point last_completion;
};

// Every file has its own batches, so that a slow disk delays no other. One thread submits; it sleeps until a
// whole batch is done, so that measuring costs little. For use by one thread.
class TransferRing {
 public:
  static Result<std::unique_ptr<TransferRing>> create(const Engine& engine, const RingShape& shape,
                                                      MemoryKind kind, Device* device, std::size_t files);
  // Over memory of the caller's, of at least shape.bytes(files).
  static std::unique_ptr<TransferRing> create(const Engine& engine, const RingShape& shape,
                                              std::span<std::byte> memory, std::size_t files);
  TransferRing(const TransferRing&) = delete;
  TransferRing& operator=(const TransferRing&) = delete;
  ~TransferRing();

  // Transfers the pieces of the schedules until they end or the duration is over. On an error, and when the
  // user interrupts, outstanding requests are cancelled and awaited first: whenever this returns, no I/O uses
  // the memory.
  Result<Moved> run(const TransferWork& work);

 private:
  struct Batch;
  class Arrivals;

  TransferRing(const Engine& engine, RingMemory memory);
  void add_batches(const RingShape& shape, std::size_t files);

  Result<bool> load(const TransferWork& work, Batch& batch);
  void submit(const TransferWork& work, Batch& batch);
  Status collect(const TransferWork& work, Batch& batch, Moved& moved);
  Status check(const TransferWork& work, const Batch& batch);
  void show_progress(const TransferWork& work, const Moved& moved);
  Status await_arrivals(const TransferWork& work, Moved& moved, const std::function<Status(Batch&)>& arrived);
  void start(const TransferWork& work, Moved& moved);
  void stop(const TransferWork& work, Moved& moved);
  Status circulate(const TransferWork& work, Moved& moved);
  Status lap(const TransferWork& work, Moved& moved);

  Engine engine_;
  RingMemory memory_;
  std::vector<std::unique_ptr<Batch>> batches_;  // ordered so that files alternate
  std::unique_ptr<Arrivals> arrivals_;
  std::size_t outstanding_ = 0;  // batches
  Clock::time_point started_;
  Clock::time_point next_tick_;
  std::vector<Clock::time_point> last_of_file_;
};

}  // namespace trunkline::cli
