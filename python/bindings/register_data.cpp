// Samples of a training: trunkline.data is on top of it.
#include <fmt/format.h>
#include <nanobind/stl/optional.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "engine_object.h"
#include "errors.h"
#include "file_object.h"
#include "interruptible.h"
#include "os/fork_generation.h"
#include "records/batch_reader.h"
#include "records/file_stamp.h"
#include "sample_table_object.h"
#include "trunkline/volume.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

using records::Batch;
using records::BatchMemory;
using records::BatchPlan;
using records::BatchReader;
using records::BatchReaderOptions;
using records::SampleReader;
using records::SampleReaderOptions;
using records::SampleTable;

using Numbers = std::optional<Array<std::uint64_t>>;

void make_table(SampleTableObject* self, Array<std::uint8_t> path_blob, const Numbers& path_ends,
                const Numbers& first_samples, const Numbers& sizes,
                std::optional<Array<std::int64_t>> mtimes_ns, const Numbers& inodes, const Numbers& offsets,
                const Numbers& lengths, std::uint64_t ranges_per_sample, std::uint64_t record_bytes,
                std::uint64_t stride_bytes, const Numbers& first_offsets) {
  SampleTableObject object{.path_blob = path_blob, .numbers = {}, .mtimes_ns = mtimes_ns};
  SampleTable& table = *object.table;
  table.path_blob = {reinterpret_cast<const char*>(path_blob.data()), path_blob.size()};
  table.path_ends = object.keep(path_ends);
  table.first_samples = object.keep(first_samples);
  table.sizes = object.keep(sizes);
  if (mtimes_ns) table.mtimes_ns = {mtimes_ns->data(), mtimes_ns->size()};
  table.inodes = object.keep(inodes);
  table.offsets = object.keep(offsets);
  table.lengths = object.keep(lengths);
  table.ranges_per_sample = ranges_per_sample;
  table.record_bytes = record_bytes;
  table.stride_bytes = stride_bytes;
  table.first_offsets = object.keep(first_offsets);
  unwrap(table.check());
  new (self) SampleTableObject(std::move(object));
}

std::optional<Volume> volume_argument(nb::handle value) {
  if (value.is_none()) return std::nullopt;
  return nb::cast<Volume&>(value);
}

SampleReaderOptions reading_options(bool has_tfrecord_framing, bool skip_damaged) {
  return {.framing = has_tfrecord_framing ? records::Framing::tfrecord : records::Framing::none,
          .skip_damaged = skip_damaged};
}

template <class T, class Get>
nb::object array_of(std::size_t count, const Get& get) {
  auto* const data = new T[count];
  for (std::size_t index = 0; index < count; ++index) data[index] = static_cast<T>(get(index));
  const nb::capsule owner(data, [](void* held) noexcept { delete[] static_cast<T*>(held); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {count}, owner));
}

// Memory that returns to the reader when the last view of it is gone.
nb::object memory_array(std::span<std::byte> memory, BatchMemory::Lease lease) {
  auto held = std::make_unique<BatchMemory::Lease>(std::move(lease));
  const nb::capsule owner(held.get(),
                          [](void* kept) noexcept { delete static_cast<BatchMemory::Lease*>(kept); });
  static_cast<void>(held.release());
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(memory.data(), {memory.size()}, owner));
}

nb::list skipped_list(const std::vector<records::SkippedSample>& skipped) {
  nb::list list;
  for (const auto& [sample, error] : skipped) list.append(nb::make_tuple(sample, exception_of(error)));
  return list;
}

// (memory, positions, lengths, samples, skipped)
nb::tuple batch_tuple(std::span<std::byte> memory, BatchMemory::Lease lease,
                      const std::vector<records::PlacedRange>& ranges,
                      const std::vector<std::uint64_t>& samples,
                      const std::vector<records::SkippedSample>& skipped) {
  return nb::make_tuple(
      memory_array(memory, std::move(lease)),
      array_of<std::int64_t>(ranges.size(), [&](std::size_t index) { return ranges[index].position; }),
      array_of<std::int64_t>(ranges.size(), [&](std::size_t index) { return ranges[index].length; }),
      array_of<std::int64_t>(samples.size(), [&](std::size_t index) { return samples[index]; }),
      skipped_list(skipped));
}

class BatchReaderObject {
 public:
  BatchReaderObject(nb::object table, const BatchReaderOptions& options, const Engine& engine,
                    std::optional<Volume> volume)
      : table_(std::move(table)), generation_(os::fork_generation()) {
    const GilReleased unlocked;
    reader_ = std::make_unique<BatchReader>(engine, nb::inst_ptr<SampleTableObject>(table_)->table,
                                            std::move(volume), options);
  }
  BatchReaderObject(const BatchReaderObject&) = delete;
  BatchReaderObject& operator=(const BatchReaderObject&) = delete;
  ~BatchReaderObject() {
    // In a forked child, its thread is the parent's; and a thread that goes on needs the table.
    if (generation_ != os::fork_generation() || !close()) {
      static_cast<void>(reader_.release());
      static_cast<void>(table_.release());
      return;
    }
    const GilReleased unlocked;
    reader_.reset();
  }

  bool close() {
    if (generation_ != os::fork_generation()) return false;
    const GilReleased unlocked;
    return reader_->close();
  }

  // None at the end.
  nb::object next(nb::handle held_timeout) {
    if (generation_ != os::fork_generation())
      raise(make_error(ErrorKind::closed, "the reader of batches belongs to the parent of this process"));
    const Future::Timeout limit = timeout_argument(held_timeout);
    auto last_free = std::chrono::steady_clock::now();  // when a buffer was seen that nobody holds
    while (true) {
      Result<std::optional<Batch>> batch = [&] {
        const GilReleased unlocked;
        return reader_->next(kSignalLatency);
      }();
      if (batch) return *batch ? shown(std::move(**batch)) : nb::none();
      if (batch.error().kind != ErrorKind::timed_out) raise(batch.error());
      check_signals();
      const auto now = std::chrono::steady_clock::now();
      if (!reader_->all_slots_held()) last_free = now;
      if (limit && now - last_free >= *limit)
        raise(make_error(ErrorKind::out_of_budget,
                         "all buffers are held by batches that are still referenced; copy what is to be kept "
                         "(batch.copy()), or make the Loader with a larger prefetch"));
    }
  }

 private:
  static nb::object shown(Batch batch) {
    return nb::make_tuple(
        batch_tuple(batch.memory, std::move(batch.lease), batch.ranges, batch.samples, batch.skipped),
        nb::make_tuple(batch.step.begin.epoch, batch.step.begin.position),
        nb::make_tuple(batch.step.end.epoch, batch.step.end.position));
  }

  nb::object table_;
  unsigned generation_;
  std::unique_ptr<BatchReader> reader_;
};

// Reads samples at once, without reading ahead.
class SampleReaderObject {
 public:
  SampleReaderObject(nb::object table, const Engine& engine, std::optional<Volume> volume,
                     SampleReaderOptions options)
      : table_(std::move(table)),
        state_(std::make_shared<State>(engine, nb::inst_ptr<SampleTableObject>(table_)->table,
                                       std::move(volume), options)) {}

  SampleReaderObject(const SampleReaderObject&) = delete;
  SampleReaderObject& operator=(const SampleReaderObject&) = delete;
  ~SampleReaderObject() {
    // A read that was interrupted and goes on needs the table.
    if (state_.use_count() > 1) static_cast<void>(table_.release());
  }

  nb::tuple read(Array<std::int64_t> wanted) {
    const SampleTable& table = *nb::inst_ptr<SampleTableObject>(table_)->table;
    std::vector<std::uint64_t> samples;
    for (std::size_t index = 0; index < wanted.size(); ++index) {
      const std::int64_t sample = wanted.data()[index];
      if (sample < 0 || static_cast<std::uint64_t>(sample) >= table.sample_count())
        raise_value_error(fmt::format("samples: {} of {}", sample, table.sample_count()));
      samples.push_back(static_cast<std::uint64_t>(sample));
    }
    const auto memory = BatchMemory::create(state_->engine, 1, std::nullopt);
    const BatchMemory::Lease lease = memory->acquire();
    memory->close();  // once the lease is dropped
    const bool in_groups = call_unlocked([&] {
      const std::scoped_lock lock(state_->mutex);
      return state_->reader.has_many_files(samples);
    });
    const Batch batch = in_groups ? read_in_groups(samples, lease) : read_together(samples, lease);
    return batch_tuple(batch.memory, lease, batch.plan.ranges, batch.plan.samples, batch.plan.skipped);
  }

 private:
  struct Batch {
    BatchPlan plan;
    std::span<std::byte> memory;
    Future future;
  };

  // Of a read that was interrupted, which goes on, it is the last owner.
  struct State {
    State(const Engine& engine_in, std::shared_ptr<const SampleTable> table, std::optional<Volume> volume,
          SampleReaderOptions options)
        : engine(engine_in), reader(engine_in, std::move(table), std::move(volume), options) {}

    Future submit(const Request& request) const { return engine.submit({&request, 1}).front(); }

    Result<Batch> begin(std::span<const std::uint64_t> samples, const BatchMemory::Lease& lease) {
      const std::scoped_lock lock(mutex);
      auto plan = reader.plan(samples);
      if (!plan) return std::unexpected(plan.error());
      if (plan->bytes == 0) return Batch{std::move(*plan), {}, {}};
      const auto memory = lease->reserve(plan->bytes);
      if (!memory) return std::unexpected(memory.error());
      Future future = submit(SampleReader::request(*plan, *memory, lease));
      return Batch{std::move(*plan), *memory, std::move(future)};
    }

    Result<Batch> read_in_groups(std::span<const std::uint64_t> samples, const BatchMemory::Lease& lease) {
      const std::scoped_lock lock(mutex);
      const auto memory = lease->reserve(reader.bytes_at_most(samples));
      if (!memory) return std::unexpected(memory.error());
      const auto wait = [](const Future& future) -> Status {
        future.wait();
        return {};
      };
      auto plan = reader.read_in_groups(
          samples, *memory, lease, [this](const Request& request) { return submit(request); }, wait);
      if (!plan) return std::unexpected(plan.error());
      const std::span<std::byte> used = memory->first(plan->bytes);
      return Batch{std::move(*plan), used, {}};
    }

    const Engine engine;
    std::mutex mutex;  // of the reader, but for finish()
    SampleReader reader;
  };

  Batch read_together(std::span<const std::uint64_t> samples, const BatchMemory::Lease& lease) {
    Batch batch = unwrap(call_unlocked([&] { return state_->begin(samples, lease); }));
    if (batch.future.valid()) wait_interruptibly(batch.future, std::nullopt);
    unwrap(call_unlocked([&] {
      const Result<std::uint64_t> read = batch.future.valid() ? batch.future.result() : 0;
      return state_->reader.finish(read, batch.memory, batch.plan);
    }));
    return batch;
  }

  Batch read_in_groups(const std::vector<std::uint64_t>& samples, const BatchMemory::Lease& lease) {
    return unwrap(call_interruptibly(
        [state = state_, samples, lease] { return state->read_in_groups(samples, lease); }));
  }

  nb::object table_;
  std::shared_ptr<State> state_;
};

void register_table(nb::module_& module) {
  nb::class_<SampleTableObject>(module, "SampleTable", "Where samples are stored, for readers.")
      .def("__init__", &make_table, nb::kw_only(), "path_blob"_a, "path_ends"_a, "first_samples"_a, "sizes"_a,
           "mtimes_ns"_a.none(), "inodes"_a.none(), "offsets"_a.none(), "lengths"_a.none(),
           "ranges_per_sample"_a, "record_bytes"_a, "stride_bytes"_a, "first_offsets"_a.none());
}

}  // namespace

void register_data(nb::module_& module) {
  register_table(module);
  module.def(
      "file_stamp",
      [](const FileObject& file) {
        const records::FileStamp stamp =
            unwrap(call_unlocked([&] { return records::stamp_of(file.file()); }));
        return nb::make_tuple(stamp.bytes, stamp.mtime_ns, stamp.inode);
      },
      "file"_a, nb::sig("def file_stamp(file: File) -> tuple[int, int, int]"),
      "(size, time of modification in ns, inode), of all parts of a file of a volume.");
  nb::class_<BatchReaderObject>(module, "BatchReader", "Reads batches ahead, on a thread of its own.")
      .def(
          "__init__",
          [](BatchReaderObject* self, nb::object table, std::uint64_t batch_size, std::uint64_t ranks,
             std::uint64_t rank, std::uint64_t block, std::uint64_t seed, bool drop_last, std::uint64_t epoch,
             std::uint64_t position, unsigned slots, std::uint64_t shares, std::uint64_t share,
             bool one_epoch, bool tfrecord, bool skip_damaged, std::optional<unsigned> cuda_ordinal,
             nb::handle engine, nb::handle volume) {
            const BatchReaderOptions options{
                .order = {.samples = nb::cast<SampleTableObject&>(table).table->sample_count(),
                          .batch_size = batch_size,
                          .ranks = ranks,
                          .rank = rank,
                          .block = block,
                          .seed = seed,
                          .drop_last = drop_last},
                .begin = {.epoch = epoch, .position = position},
                .slots = slots,
                .reading = reading_options(tfrecord, skip_damaged),
                .shares = shares,
                .share = share,
                .one_epoch = one_epoch,
                .cuda_ordinal = cuda_ordinal};
            const Engine used = engine_or_default(engine);
            new (self) BatchReaderObject(std::move(table), options, used, volume_argument(volume));
          },
          "table"_a, nb::kw_only(), "batch_size"_a, "ranks"_a, "rank"_a, "block"_a, "seed"_a, "drop_last"_a,
          "epoch"_a, "position"_a, "slots"_a, "shares"_a, "share"_a, "one_epoch"_a, "tfrecord"_a,
          "skip_damaged"_a, "cuda_ordinal"_a.none(), "engine"_a.none(), "volume"_a.none())
      .def("next", &BatchReaderObject::next, "held_timeout"_a.none(),
           nb::sig("def next(self, held_timeout: float | None) -> typing.Any"))
      .def("close", &BatchReaderObject::close);
  nb::class_<SampleReaderObject>(module, "SampleReader", "Reads samples at once.")
      .def(
          "__init__",
          [](SampleReaderObject* self, nb::object table, bool tfrecord, bool skip_damaged, nb::handle engine,
             nb::handle volume) {
            const Engine used = engine_or_default(engine);
            new (self) SampleReaderObject(std::move(table), used, volume_argument(volume),
                                          reading_options(tfrecord, skip_damaged));
          },
          "table"_a, nb::kw_only(), "tfrecord"_a, "skip_damaged"_a, "engine"_a.none(), "volume"_a.none())
      .def("read", &SampleReaderObject::read, "samples"_a,
           nb::sig("def read(self, samples: typing.Any) -> tuple[typing.Any, ...]"));
}

}  // namespace trunkline::python
