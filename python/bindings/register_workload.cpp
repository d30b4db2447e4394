// Emulated trainings, for trunkline/workload. Private to the package.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "engine_object.h"
#include "errors.h"
#include "gil.h"
#include "interruptible.h"
#include "io/engine_core.h"
#include "os/precise_sleep.h"
#include "python_reduction.h"
#include "sample_table_object.h"
#include "trunkline/volume.h"
#include "workload/collective_barrier.h"
#include "workload/duration_histogram.h"
#include "workload/paced_source.h"
#include "workload/shared_barrier.h"
#include "workload/training_loop.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

using workload::BarrierMemory;
using workload::SharedBarrier;
using workload::StepBarrier;
using workload::TrainingLoop;

// The memory of one of the barriers in a file, shared with the processes that map the same descriptor.
class BarrierMapping {
 public:
  static constexpr std::size_t kBytes = 4096;  // a page each, as offsets of mappings must be
  static_assert(sizeof(BarrierMemory) <= kBytes);

  BarrierMapping(int descriptor, unsigned number) {
    void* const mapped = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor,
                                static_cast<off_t>(number * kBytes));
    if (mapped == MAP_FAILED) raise(system_error(errno, "map the memory of the ranks"));
    memory_ = static_cast<BarrierMemory*>(mapped);
  }
  BarrierMapping(const BarrierMapping&) = delete;
  BarrierMapping& operator=(const BarrierMapping&) = delete;
  ~BarrierMapping() { ::munmap(memory_, kBytes); }

  BarrierMemory& memory() { return *memory_; }
  void abort() { SharedBarrier::abort(*memory_); }

 private:
  BarrierMemory* memory_ = nullptr;
};

// A list for each quantity; the buckets follow each other from `first` on, in widths since the clock's zero.
nb::dict dict_of(const workload::TimeLine& line) {
  nb::list compute;
  nb::list wait;
  nb::list bytes;
  for (const workload::TimeBucket& each : line.buckets()) {
    compute.append(each.compute_ns);
    wait.append(each.wait_ns);
    bytes.append(each.bytes);
  }
  nb::dict dict;
  dict["width_ns"] = line.width_ns();
  dict["first"] = line.first();
  dict["compute_ns"] = compute;
  dict["wait_ns"] = wait;
  dict["bytes"] = bytes;
  return dict;
}

nb::dict dict_of(const workload::TrainingStats& stats) {
  const workload::AcceleratorStats& accelerator = stats.accelerator;
  nb::dict dict;
  dict["steps"] = accelerator.steps;
  dict["samples"] = stats.samples;
  dict["bytes"] = stats.bytes;
  dict["busy_ns"] = accelerator.busy_ns;
  dict["running_ns"] = accelerator.running_ns;
  dict["first_busy_ns"] = accelerator.first_busy_ns;
  dict["first_running_ns"] = accelerator.first_running_ns;
  dict["late_loop_ns"] = accelerator.late_loop_ns;
  dict["loop_cpu_ns"] = stats.loop_cpu_ns;
  dict["step_times"] = accelerator.step_times.counts();
  dict["waits"] = accelerator.waits.counts();
  nb::list epochs;
  for (const workload::EpochTimes& epoch : accelerator.epochs)
    epochs.append(nb::make_tuple(epoch.steps, epoch.busy_ns, epoch.running_ns));
  dict["epochs"] = epochs;
  dict["time_line"] = dict_of(accelerator.time_line);
  return dict;
}

// How many reads of the default engine are in flight, from its making until it is taken.
class ReadsInFlightObject {
 public:
  ReadsInFlightObject() : engine_(engine_or_default(nb::none())) { engine_.core()->start_reads_in_flight(); }
  ReadsInFlightObject(const ReadsInFlightObject&) = delete;
  ReadsInFlightObject& operator=(const ReadsInFlightObject&) = delete;
  ~ReadsInFlightObject() {
    engine_.core()->take_reads_in_flight();
    const GilReleased unlocked;  // the last handle waits for the lanes
    engine_ = Engine();
  }

  // As the time lines of loops; one for each lane of the engine.
  nb::list take() {
    nb::list lines;
    for (const io::ReadsInFlight& each : engine_.core()->take_reads_in_flight()) {
      nb::list reads;
      nb::list bytes;
      for (const io::InFlightBucket& bucket : each.sums().buckets()) {
        reads.append(bucket.read_ns);
        bytes.append(bucket.byte_ns);
      }
      nb::dict dict;
      dict["width_ns"] = each.sums().width_ns();
      dict["first"] = each.sums().first();
      dict["read_ns"] = reads;
      dict["byte_ns"] = bytes;
      lines.append(dict);
    }
    return lines;
  }

 private:
  Engine engine_;
};

class TrainingLoopObject {
 public:
  // `make_source` gets the clock of the loop.
  template <typename MakeSource>
  TrainingLoopObject(nb::object table, nb::object barrier, const MakeSource& make_source,
                     const workload::TrainingOptions& options, std::uint32_t ranks)
      : table_(std::move(table)), barrier_(std::move(barrier)) {
    loop_ = std::make_unique<TrainingLoop>(make_source(clock_), options, clock_, make_barrier(ranks));
  }
  TrainingLoopObject(const TrainingLoopObject&) = delete;
  TrainingLoopObject& operator=(const TrainingLoopObject&) = delete;
  ~TrainingLoopObject() { close(); }

  bool advance(std::uint64_t steps) {
    check_open();
    Result<bool> done = [&] {
      const GilReleased unlocked;
      return loop_->advance(steps, std::chrono::nanoseconds(kSignalLatency).count());
    }();
    if (!done) {
      if (reduction_) reduction_->raise_pending();
      raise(done.error());
    }
    check_signals();
    return *done;
  }

  void begin_epoch() {
    check_open();
    loop_->begin_epoch();
  }

  void pause() {
    check_open();
    loop_->pause();
  }

  nb::dict stats() {
    check_open();
    return dict_of(loop_->stats());
  }

  std::uint64_t steps() {
    check_open();
    return loop_->steps();
  }

  void close() {
    if (!loop_) return;
    bool ended = false;
    {
      const GilReleased unlocked;
      ended = loop_->close();
      loop_.reset();
    }
    if (!ended) static_cast<void>(table_.release());  // a thread that goes on needs it
  }

 private:
  // Of the memory that ranks share, or else of a reduction in Python.
  std::unique_ptr<StepBarrier> make_barrier(std::uint32_t ranks) {
    if (barrier_.is_none()) return nullptr;
    if (nb::isinstance<BarrierMapping>(barrier_))
      return std::make_unique<SharedBarrier>(nb::cast<BarrierMapping&>(barrier_).memory(), ranks);
    reduction_ = std::make_unique<PythonReduction>(barrier_);
    return std::make_unique<workload::CollectiveBarrier>(*reduction_, clock_);
  }

  void check_open() const {
    if (!loop_) raise(make_error(ErrorKind::closed, "the loop of the training is closed"));
  }

  nb::object table_;  // what the reader reads by
  nb::object barrier_;
  workload::SystemClock clock_;
  std::unique_ptr<PythonReduction> reduction_;
  std::unique_ptr<TrainingLoop> loop_;
};

// The table, or None for a null device with `units` of them: one of `device_gb_s` that reads `unit_bytes` for
// each, or without a speed one that takes no time.
void make_loop(TrainingLoopObject* self, nb::object table, std::uint64_t units, std::uint64_t units_per_read,
               std::uint64_t ranks, std::uint64_t rank, std::uint64_t block, std::uint64_t order_seed,
               std::uint64_t files_at_a_time, std::uint64_t chunk, unsigned slots, bool tfrecord,
               std::uint64_t batch_size, std::uint64_t samples_per_unit, std::uint64_t units_per_file,
               std::uint64_t samples_of_last_unit, double compute_seconds, double compute_stdev_seconds,
               std::uint64_t compute_seed, std::uint64_t skipped_steps, nb::object barrier, double unit_bytes,
               std::optional<double> device_gb_s) {
  const records::OrderOptions order{
      .samples = units,
      .batch_size = units_per_read,
      .ranks = ranks,
      .rank = rank,
      .block = block,
      .seed = order_seed,
      .interleaving = {.file_samples = units_per_file, .files = files_at_a_time, .chunk = chunk},
      .drop_last = true};
  const auto make_source = [&](workload::Clock& clock) -> std::unique_ptr<workload::BatchSource> {
    if (table.is_none() && device_gb_s) {
      const workload::PacedDevice device{
          .bytes_per_ns = *device_gb_s, .unit_bytes = unit_bytes, .slots = slots};
      return std::make_unique<workload::PacedSource>(order, device, clock);
    }
    if (table.is_none()) return std::make_unique<workload::NullSource>(order);
    const records::BatchReaderOptions reading{
        .order = order,
        .begin = {},
        .slots = slots,
        .reading = {.framing = tfrecord ? records::Framing::tfrecord : records::Framing::none}};
    const Engine engine = engine_or_default(nb::none());
    const auto shared = nb::cast<SampleTableObject&>(table).table;
    const GilReleased unlocked;
    return std::make_unique<workload::ReaderSource>(
        std::make_unique<records::BatchReader>(engine, shared, std::nullopt, reading));
  };
  const workload::TrainingOptions options{.batch_size = batch_size,
                                          .unit_samples = {.each = samples_per_unit,
                                                           .units_per_file = units_per_file,
                                                           .last_in_file = samples_of_last_unit},
                                          .compute_ns = compute_seconds * 1e9,
                                          .compute_stdev_ns = compute_stdev_seconds * 1e9,
                                          .seed = compute_seed,
                                          .skipped_steps = skipped_steps};
  new (self)
      TrainingLoopObject(table, std::move(barrier), make_source, options, static_cast<std::uint32_t>(ranks));
}

}  // namespace

void register_workload(nb::module_& module) {
  nb::class_<BarrierMapping>(module, "StepBarrierMemory", "Where ranks meet. Private.")
      .def(nb::init<int, unsigned>(), "descriptor"_a, "number"_a)
      .def("abort", &BarrierMapping::abort, "Ends the waits of all ranks.")
      .def_static("size", [] { return BarrierMapping::kBytes; }, "Bytes of each in the file.");
  module.def(
      "sleep_until_ns",
      [](std::int64_t deadline) {
        const GilReleased unlocked;
        const os::FineTimers fine;
        os::sleep_until_ns(deadline);
      },
      "deadline"_a, "Returns at that time of CLOCK_MONOTONIC, or when a signal has arrived. Private.");
  nb::class_<workload::DurationHistogram>(module, "DurationHistogram", "Counts durations. Private.")
      .def(nb::init<>())
      .def("add_ns", &workload::DurationHistogram::add, "ns"_a)
      .def("counts", &workload::DurationHistogram::counts,
           "(largest nanoseconds, count) of each bucket that is not empty, ascending.");
  nb::class_<ReadsInFlightObject>(module, "ReadsInFlight",
                                  "Records how many reads of the default engine are in flight. Private.")
      .def(nb::init<>(), "Begins; one at a time.")
      .def("take", &ReadsInFlightObject::take, nb::sig("def take(self) -> list[dict[str, typing.Any]]"),
           "Ends, and returns sums over time for each lane. Reads that have not ended are missing.");
  nb::class_<TrainingLoopObject>(module, "TrainingLoop", "The loop of an emulated training. Private.")
      .def("__init__", &make_loop, "table"_a.none(), nb::kw_only(), "units"_a, "units_per_read"_a, "ranks"_a,
           "rank"_a, "block"_a, "order_seed"_a, "files_at_a_time"_a, "chunk"_a, "slots"_a, "tfrecord"_a,
           "batch_size"_a, "samples_per_unit"_a, "units_per_file"_a, "samples_of_last_unit"_a,
           "compute_seconds"_a, "compute_stdev_seconds"_a, "compute_seed"_a, "skipped_steps"_a,
           "barrier"_a.none(), "unit_bytes"_a, "device_gb_s"_a.none())
      .def("begin_epoch", &TrainingLoopObject::begin_epoch)
      .def("advance", &TrainingLoopObject::advance, "steps"_a,
           "Goes on for a short time, until the epoch has had `steps`; then returns True.")
      .def("pause", &TrainingLoopObject::pause, "What happens until the next advance() counts nowhere.")
      .def("steps", &TrainingLoopObject::steps, "Steps that have begun.")
      .def("stats", &TrainingLoopObject::stats, nb::sig("def stats(self) -> dict[str, typing.Any]"))
      .def("close", &TrainingLoopObject::close, "Ends reading. Idempotent.");
}

}  // namespace trunkline::python
