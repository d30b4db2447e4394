#include "io/engine_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <thread>
#include <utility>

#include "base/log.h"
#include "device/device.h"
#include "io/backends/faulty.h"
#include "io/file/file_core.h"
#include "io/gpu/gds_policy.h"
#include "io/submission.h"
#include "io/tuned_settings.h"
#include "os/fork_generation.h"
#include "os/precise_sleep.h"
#include "os/trace_file.h"
#include "trunkline/units.h"

namespace trunkline {
namespace {

// Operations in the queue before submitters wait.
constexpr std::size_t kQueueCapacity = 4096;
// Bounce slots of a lane, at most: enough to keep a device busy while copies run.
constexpr unsigned kMaxLaneSlots = 32;
// Callers that can bounce inline at the same time; further ones go through the lanes.
constexpr unsigned kInlineSlots = 4;
// How often close_while() asks whether to go on.
constexpr std::chrono::milliseconds kProgressInterval{50};

// An engine whose last handle is dropped on one of its own lanes (by an operation that was the last to hold
// it) cannot join itself there.
void destroy(EngineCore* core) {
  if (core->belongs_to_parent()) return;  // leaked on purpose: its threads and locks are the parent's
  const auto close_and_delete = [core] {
    core->close();
    delete core;  // NOLINT(cppcoreguidelines-owning-memory)
  };
  if (core->is_lane_thread())
    std::thread(close_and_delete).detach();
  else
    close_and_delete();
}

}  // namespace

EngineCore::EngineCore(const EngineOptions& options, const EngineConfig& config,
                       std::shared_ptr<const tuning::TuningTable> tunings, bool block_was_passed)
    : generation_(os::fork_generation()),
      config_(config),
      faults_(std::static_pointer_cast<io::FaultPlan>(options.faults)),
      budget_(std::make_shared<PinnedBudget>(config.pinned_budget_bytes)),
      staging_(std::make_shared<StagingPool>(budget_)),
      queue_(config.block_bytes, kQueueCapacity),
      tunings_(std::move(tunings)),
      block_was_passed_(block_was_passed),
      inline_runner_({.block_bytes = config.block_bytes,
                      .slot_bytes = config.slot_bytes,
                      .slots = bounce_slots(kInlineSlots),
                      .budget = budget_,
                      .faults = faults_},
                     counters_) {}

struct EngineCore::Origin {
  std::shared_ptr<const tuning::TuningTable> tunings = {};
  bool block_was_passed = false;
  std::string_view why = {};  // for the log; empty: the caller's options
};

Result<std::shared_ptr<EngineCore>> EngineCore::create(const EngineOptions& options) {
  os::start_trace_from_environment();
  Origin origin{.block_was_passed = options.block_bytes.has_value()};
  if (options.backend == BackendKind::memory) return create(options, origin);
  origin.tunings = tuning::TuningTable::load();
  const tuning::Tuning* const found = origin.tunings->find(options.paths);
  const tuning::Settings settings = found != nullptr        ? found->settings
                                    : options.paths.empty() ? origin.tunings->agreed()
                                                            : tuning::Settings{};
  if (const auto tuned = io::tuned_options(options, settings, found != nullptr)) {
    origin.why = "as tuned";
    auto core = create(*tuned, origin);
    if (core) return core;
    log::warn(log::Component::engine, "saved settings are ignored: {}", core.error().message);
    origin.why = {};
  }
  return create(options, origin);
}

Result<std::shared_ptr<EngineCore>> EngineCore::create(const EngineOptions& options, const Origin& origin) {
  auto config = io::resolve(options);
  if (!config) return std::unexpected(config.error());
  std::shared_ptr<EngineCore> core(new EngineCore(options, *config, origin.tunings, origin.block_was_passed),
                                   destroy);
  if (options.backend != BackendKind::automatic) {
    if (auto started = core->start_lanes(options.backend); !started) {
      return std::unexpected(make_error(
          ErrorKind::unsupported,
          fmt::format("backend: {} was refused here: {}; use backend=\"auto\" for the best one that works",
                      to_string(options.backend), started.error().message)));
    }
    core->log_choice(origin.why.empty() ? "as named" : origin.why);
    return core;
  }
  for (const BackendKind kind : kKernelBackends) {
    auto started = core->start_lanes(kind);
    if (started) {
      core->log_choice(origin.why.empty() ? "the first that works" : origin.why);
      return core;
    }
    log::info(log::Component::engine, "backend {} refused: {}", to_string(kind), started.error().message);
    core->refused_backends_.push_back({std::string(to_string(kind)), started.error().message});
  }
  return std::unexpected(
      make_error(ErrorKind::unsupported,
                 fmt::format("no backend works here; the last, {}, was refused: {}",
                             core->refused_backends_.back().what, core->refused_backends_.back().why)));
}

Status EngineCore::start_lanes(BackendKind kind) {
  for (unsigned index = 0; index < config_.lanes; ++index) {
    const io::LaneOptions lane{.backend = kind,
                               .index = index,
                               .depth = config_.queue_depth,
                               .slot_bytes = config_.slot_bytes,
                               .slots = bounce_slots(std::min(kMaxLaneSlots, config_.queue_depth)),
                               .budget = budget_,
                               .gpu = config_.gpu,
                               .faults = faults_,
                               .refusals = &refusals_};
    lanes_.push_back(std::make_unique<io::Lane>(lane, queue_));
    if (auto started = lanes_.back()->start(); !started) {
      lanes_.clear();  // joins those that run
      return started;
    }
  }
  config_.backend = kind;
  config_.features = lanes_.front()->features();
  return {};
}

void EngineCore::log_choice(std::string_view why) const {
  log::info(log::Component::engine,
            "backend {} ({}; {}): lanes: {}, queue depth {}, blocks of {}, at most {} of pinned memory",
            to_string(config_.backend), why,
            config_.features.empty() ? std::string("no features")
                                     : fmt::format("{}", fmt::join(config_.features, ", ")),
            config_.lanes, config_.queue_depth, format_size(config_.block_bytes),
            format_bytes(config_.pinned_budget_bytes));
}

// Slots of one pool. Half of the budget at most is for bouncing, shared by the lanes and inline work; the
// rest is the user's.
unsigned EngineCore::bounce_slots(unsigned most) const {
  const std::uint64_t room = config_.pinned_budget_bytes / 2 / config_.slot_bytes / (config_.lanes + 1);
  return static_cast<unsigned>(std::min<std::uint64_t>(room, most));
}

Status EngineCore::usable() const {
  if (belongs_to_parent()) {
    return std::unexpected(make_error(ErrorKind::closed,
                                      "this engine belongs to the parent process, and cannot be used after "
                                      "fork; create one in the child, or use the default engine, and load "
                                      "models that stream their weights in the child"));
  }
  if (queue_.closed()) return std::unexpected(make_error(ErrorKind::closed, "the engine is closed"));
  return {};
}

bool EngineCore::belongs_to_parent() const { return generation_ != os::fork_generation(); }

bool EngineCore::is_lane_thread() const {
  return std::ranges::any_of(lanes_, [](const auto& lane) { return lane->is_this_thread(); });
}

Result<std::shared_ptr<Operation>> EngineCore::make_operation(const Request& request) {
  if (request.ranges != nullptr) return make_read_of_ranges(request);
  if (request.file == nullptr || !request.file->valid())
    return std::unexpected(
        make_error(ErrorKind::invalid_argument, "file: is not open; a request requires an open file"));
  if (request.op == Op::sync)
    return std::unexpected(
        make_error(ErrorKind::invalid_argument, "op: a request must read or write; use File::sync to sync"));
  if (auto status = usable(); !status) return std::unexpected(status.error());
  const auto& file = request.file->core();
  const MemoryView& memory = request.memory;
  if (memory.data == nullptr && memory.bytes > 0)
    return std::unexpected(
        make_error(ErrorKind::invalid_argument, "memory: a null pointer with a size", file->name));
  unsigned write_epoch = 0;
  if (auto begun = file->begin(request.op, request.offset, memory.bytes, write_epoch); !begun)
    return std::unexpected(begun.error());
  Status ready;
  if (request.op == Op::write && memory.bytes > 0)
    ready = file->extend(request.offset, memory.bytes, config_.slot_bytes);
  if (memory.bytes == 0 || !ready) {
    file->end(request.op, write_epoch);
    if (!ready) return std::unexpected(ready.error());
    return Operation::finished(0);
  }
  auto fence = fence_for(memory);
  auto gpu_direct = fence ? can_use_gds(*file, memory) : std::unexpected(fence.error());
  if (!gpu_direct) {
    file->end(request.op, write_epoch);
    return std::unexpected(gpu_direct.error());
  }
  auto operation = std::make_shared<Operation>(request.op, shared_from_this(), file, memory, request.offset,
                                               request.keepalive, *std::move(fence));
  operation->write_epoch = write_epoch;
  operation->block_bytes = file->tuned_block_bytes;
  operation->cursor.gpu_direct = *gpu_direct;
  operation->cursor.gds_required = io::is_gds_required(config_.gpu);
  return operation;
}

Result<std::shared_ptr<Operation>> EngineCore::make_read_of_ranges(const Request& request) {
  const MemoryView& memory = request.memory;
  if (request.op != Op::read)
    return std::unexpected(
        make_error(ErrorKind::invalid_argument, "op: ranges can be read only; write each by a request"));
  if (auto status = usable(); !status) return std::unexpected(status.error());
  if (memory.data == nullptr && memory.bytes > 0)
    return std::unexpected(make_error(ErrorKind::invalid_argument, "memory: a null pointer with a size"));
  auto list = io::RangeList::create(*request.ranges, memory);
  if (!list) return std::unexpected(list.error());
  if (auto begun = list->begin(); !begun) return std::unexpected(begun.error());
  if (list->items.empty()) {
    list->end();
    return Operation::finished(0);
  }
  auto fence = fence_for(memory);
  auto gpu_direct = fence ? Result<bool>(true) : std::unexpected(fence.error());
  for (std::size_t index = 0; index < list->files.size() && gpu_direct && *gpu_direct; ++index)
    gpu_direct = can_use_gds(*list->files[index], memory);
  if (!gpu_direct) {
    list->end();
    return std::unexpected(gpu_direct.error());
  }
  const std::uint64_t block_bytes = list->files.front()->tuned_block_bytes;
  auto operation = std::make_shared<Operation>(*std::move(list), shared_from_this(), memory,
                                               request.keepalive, *std::move(fence));
  operation->block_bytes = block_bytes;
  operation->cursor.gpu_direct = *gpu_direct;
  operation->cursor.gds_required = io::is_gds_required(config_.gpu);
  return operation;
}

// What copies of a device's memory must come after; none for host memory.
Result<Fence> EngineCore::fence_for(const MemoryView& memory) {
  if (is_host(memory)) return Fence();
  return memory.device->fence(memory.stream);
}

// Whether a device can access the file directly; an error if it must, and cannot.
Result<bool> EngineCore::can_use_gds(FileCore& file, const MemoryView& memory) {
  if (is_host(memory)) return false;
  const Status reaches = file.gpu_reaches(*memory.device, config_.gpu);
  if (!reaches && io::is_gds_required(config_.gpu)) return std::unexpected(reaches.error());
  return reaches.has_value();
}

std::vector<Future> EngineCore::submit(std::span<const Request> requests) {
  io::Submission submission(shared_from_this(), requests);
  submission.advance(std::nullopt);
  return submission.take_futures();
}

std::size_t EngineCore::enqueue(std::span<const std::shared_ptr<Operation>> operations,
                                Future::Timeout timeout) {
  const std::size_t count = queue_.push(operations, timeout);
  if (count == 0) return 0;
  // A long operation is work for every lane, and so are many.
  for (const auto& lane : lanes_) lane->wake_if_wants_work();
  return count;
}

Status EngineCore::make_room(const std::shared_ptr<FileCore>& file, std::uint64_t offset,
                             std::uint64_t bytes) {
  unsigned write_epoch = 0;
  if (auto begun = file->begin(Op::write, offset, bytes, write_epoch); !begun) return begun;
  Status made = file->extend(offset, bytes, config_.slot_bytes);
  file->end(Op::write, write_epoch);
  return made;
}

Result<std::uint64_t> EngineCore::run(Op op, const std::shared_ptr<FileCore>& file, const MemoryView& memory,
                                      std::uint64_t offset) {
  if (runs_inline(memory)) return run_inline(*file, op, memory, offset);
  const File handle(file);
  const Request request{.op = op, .file = &handle, .memory = memory, .offset = offset};
  return submit({&request, 1}).front().result();
}

Status EngineCore::run_sync(const std::shared_ptr<FileCore>& file) {
  if (file->layout.members == 1) {
    Status status = usable();
    if (status) status = inline_runner_.move_all({.op = Op::sync, .file = file.get()});
    file->end(Op::sync, 0);
    counters_.count_operation(!status, true);
    return status;
  }
  auto operation = std::make_shared<Operation>(Op::sync, shared_from_this(), file, MemoryView{}, 0, nullptr);
  if (enqueue({&operation, 1}, std::nullopt) == 0) io::end_unsent(*operation);
  operation->wait(std::nullopt);
  if (auto result = operation->result(); !result) return std::unexpected(result.error());
  return {};
}

Result<std::uint64_t> EngineCore::run_inline(FileCore& file, Op op, const MemoryView& memory,
                                             std::uint64_t offset) {
  Status status = usable();
  unsigned write_epoch = 0;
  if (status && memory.data == nullptr && memory.bytes > 0)
    status = std::unexpected(
        make_error(ErrorKind::invalid_argument, "memory: a null pointer with a size", file.name));
  if (status) {
    status = file.begin(op, offset, memory.bytes, write_epoch);
    if (status) {
      if (op == Op::write && memory.bytes > 0) status = file.extend(offset, memory.bytes, config_.slot_bytes);
      if (status)
        status = inline_runner_.move_all({.op = op, .file = &file, .memory = memory, .offset = offset});
      file.end(op, write_epoch);
    }
  }
  counters_.count_operation(!status, true);
  if (!status) return std::unexpected(status.error());
  return memory.bytes;
}

EngineStats EngineCore::stats() const {
  EngineStats sum;
  counters_.add_to(sum);
  for (const auto& lane : lanes_) lane->counters().add_to(sum);
  sum.pinned_bytes = budget_->used_bytes();
  sum.peak_pinned_bytes = budget_->peak_bytes();
  return sum;
}

void EngineCore::start_latency_logs(std::size_t most) {
  for (const auto& lane : lanes_) lane->counters().start_latency_log(most);
}

std::vector<io::LatencyLog> EngineCore::take_latency_logs() {
  std::vector<io::LatencyLog> logs;
  for (const auto& lane : lanes_) logs.push_back(lane->counters().take_latency_log());
  return logs;
}

void EngineCore::start_reads_in_flight() {
  const std::int64_t now = os::monotonic_ns();
  counters_.start_reads_in_flight(now);
  for (const auto& lane : lanes_) lane->counters().start_reads_in_flight(now);
}

std::vector<io::ReadsInFlight> EngineCore::take_reads_in_flight() {
  std::vector<io::ReadsInFlight> taken;
  const auto take = [&](io::Counters& counters) {
    if (auto reads = counters.take_reads_in_flight()) taken.push_back(std::move(*reads));
  };
  take(counters_);
  for (const auto& lane : lanes_) take(lane->counters());
  return taken;
}

std::vector<Refusal> EngineCore::refusals() const {
  std::vector<Refusal> all = refused_backends_;
  std::ranges::move(refusals_.all(), std::back_inserter(all));
  return all;
}

void EngineCore::close() {
  if (belongs_to_parent()) return;
  const std::scoped_lock lock(close_mutex_);
  queue_.close();
  for (const auto& lane : lanes_) lane->join();
  staging_->trim();
}

bool EngineCore::close_while(const std::function<bool(std::uint64_t completed)>& keep_waiting) {
  if (belongs_to_parent()) return true;
  queue_.close();
  while (!join_lanes_until(std::chrono::steady_clock::now() + kProgressInterval)) {
    if (!keep_waiting(completed_transfers())) return false;
  }
  return true;
}

bool EngineCore::join_lanes_until(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(close_mutex_, std::defer_lock);
  while (!lock.try_lock()) {  // another thread is closing it, and may be stuck
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return std::ranges::all_of(lanes_, [&](const auto& lane) { return lane->join_until(deadline); });
}

// A retry is not counted: a device that only ever answers EAGAIN makes no progress.
std::uint64_t EngineCore::completed_transfers() const {
  EngineStats sum;
  for (const auto& lane : lanes_) lane->counters().add_to(sum);
  return sum.transfers - sum.retries;
}

}  // namespace trunkline
