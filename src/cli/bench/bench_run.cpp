#include "cli/bench/bench_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <thread>

#include "cli/bench/bench_content.h"
#include "cli/interrupt.h"
#include "io/engine_core.h"
#include "trunkline/device.h"

namespace trunkline::cli {
namespace {

constexpr std::uint64_t kMaxLapBytes =
    4 * kGiB;  // of memory whose content is generated and checked outside the timed part

Status unless_interrupted() {
  if (interrupted()) return std::unexpected(make_error(ErrorKind::cancelled, "interrupted"));
  return {};
}

}  // namespace

// ---------------------------------------------------------------------------------------------- whole run

Result<BenchResults> BenchRun::run() {
  seed_ =
      options_.seed ? *options_.seed : (std::uint64_t{std::random_device{}()} << 32) | std::random_device{}();
  BenchResults results;
  results.config = engine_.config();
  if (extras_.fio) results.fio_version = extras_.fio->version();
  for (const Case& what : cases_of(options_)) results.cases.push_back({.what = what});
  Status status = files_.check_space();
  if (status) status = describe_paths(results);
  if (status) status = make_ring();
  if (extras_.fio) results.fio_terms = fio_terms(fio_job(results.cases.back().what));
  if (extras_.gdsio) results.gdsio_terms = gdsio_terms(gdsio_job(results.cases.front().what));
  if (status && options_.verify) status = learn_patterns();
  for (unsigned repeat = 1; repeat <= options_.repeat; ++repeat) {
    for (CaseResult& result : results.cases) {
      if (status) status = run_case(repeat, result);
    }
  }
  progress_.end();
  if (!status) return std::unexpected(status.error());
  for (CaseResult& result : results.cases) {
    std::ranges::sort(result.latencies.reads);
    std::ranges::sort(result.latencies.writes);
  }
  return results;
}

Status BenchRun::describe_paths(BenchResults& results) {
  direct_ = true;
  for (std::size_t target = 0; target < options_.paths.size(); ++target) {
    auto explanation = engine_.explain(options_.paths[target]);
    if (!explanation) return std::unexpected(explanation.error());
    direct_ = direct_ && explanation->direct;
    PathResult path{.path = options_.paths[target], .explanation = std::move(*explanation)};
    for (const BenchFile& file : files_.all()) {
      if (file.target != target) continue;
      path.existing = !file.own;
      path.files.push_back(file.path);
      path.file_bytes = file.bytes;
    }
    results.paths.push_back(std::move(path));
  }
  if (options_.direct != Direct::automatic) direct_ = options_.direct == Direct::always;
  results.direct = direct_;
  return {};
}

Status BenchRun::make_ring() {
  const EngineConfig& config = engine_.config();
  const RingLimits limits{.block_bytes = options_.block_bytes,
                          .in_flight = std::uint64_t{config.lanes} * config.queue_depth,
                          .memory_bytes = std::min(config.pinned_budget_bytes / 2, kMaxLapBytes)};
  const std::uint64_t files = files_.all().size();
  std::uint64_t longest = 0;
  for (const BenchFile& file : files_.all()) longest = std::max(longest, file.bytes);
  // Blocks of various sizes, or of either operation, are requests of their own, as in random order.
  const bool apart = options_.least_block_bytes || options_.mix;
  const Order order = apart ? Order::random : options_.order();
  shape_ = options_.verify ? lap_shape(order, files, longest, limits) : ring_shape(order, files, limits);
  Device* device = nullptr;
  if (options_.cuda) {
    auto opened = cuda_device(*options_.cuda);
    if (!opened) return std::unexpected(opened.error());
    device = *opened;
  }
  auto ring = TransferRing::create(engine_, shape_, options_.memory, device, files);
  if (!ring) return std::unexpected(ring.error());
  ring_ = std::move(*ring);
  return {};
}

Status BenchRun::run_case(unsigned repeat, CaseResult& result) {
  const std::string label = fmt::format("{} {}/{}", result.what.label(), repeat, options_.repeat);
  auto measurement = measure(result.what, label);
  if (!measurement) return std::unexpected(measurement.error());
  if (extras_.log) {
    const auto logs = std::exchange(measurement->logs, {});
    if (auto logged = extras_.log->add(result.what.label(), repeat, logs, result.latencies); !logged)
      return logged;
  }
  result.runs.push_back(std::move(*measurement));
  result.verified = options_.verify;
  return run_peers(label, result);
}

FioJob BenchRun::fio_job(const Case& what) const {
  const EngineConfig& config = engine_.config();
  FioJob job{.what = what,
             .order = options_.order(),
             .files = {},
             .file_bytes = files_.all().front().bytes,
             .block_bytes = options_.block_bytes,
             .least_block_bytes = options_.least_block_bytes.value_or(options_.block_bytes),
             .backend = config.backend,
             .lanes = config.lanes,
             .queue_depth = config.queue_depth,
             .direct = direct_,
             .huge_pages = options_.memory == MemoryKind::aligned,
             .duration_s = by_duration(what) ? options_.duration_s : 0,
             .seed = options_.seed};
  for (const BenchFile& file : files_.all()) job.files.push_back(file.path);
  return job;
}

GdsioJob BenchRun::gdsio_job(const Case& what) const {
  const EngineConfig& config = engine_.config();
  return {.what = what,
          .order = options_.order(),
          .file = files_.all().front().path,
          .file_bytes = files_.all().front().bytes,
          .block_bytes = options_.block_bytes,
          .in_flight = config.lanes * config.queue_depth,
          .cuda = options_.cuda,
          .duration_s = by_duration(what) ? options_.duration_s : 0};
}

template <class Peer, class Job>
auto BenchRun::run_peer(const Peer& peer, const Case& what, const std::string& label, const Job& job) {
  using Measured = decltype(peer.measure(job));
  if (auto status = prepare(what); !status) return Measured(std::unexpected(status.error()));
  progress_.begin(label, 0, 0, Clock::now());
  auto measurement = peer.measure(job);
  for (BenchFile& file : files_.all()) {
    if (!what.writes()) break;
    file.pattern.reset();
    file.complete = true;
  }
  return measurement;
}

Status BenchRun::run_peers(const std::string& label, CaseResult& result) {
  if (extras_.fio) {
    auto fio = run_peer(*extras_.fio, result.what, "fio " + label, fio_job(result.what));
    if (!fio) return std::unexpected(fio.error());
    result.fio.push_back(std::move(*fio));
  }
  if (extras_.gdsio) {
    auto gdsio = run_peer(*extras_.gdsio, result.what, "gdsio " + label, gdsio_job(result.what));
    if (!gdsio) return std::unexpected(gdsio.error());
    result.gdsio.push_back(std::move(*gdsio));
  }
  return unless_interrupted();
}

// ---------------------------------------------------------------------------------------------- preparation

Status BenchRun::prepare(const Case& what) {
  const bool whole = what.op == Op::read || what.write_mode == WriteMode::overwrite;
  if (whole) {
    const bool ready = std::ranges::all_of(files_.all(), [&](const BenchFile& file) {
      return file.complete && (!what.reads() || !options_.verify || file.pattern);
    });
    if (!ready) {
      if (auto status = lay_out(); !status) return status;
    }
    return what.reads() ? drop_page_cache() : Status{};
  }
  for (BenchFile& file : files_.all()) {
    auto status = BenchFiles::remove(file);
    if (status && what.write_mode == WriteMode::preallocated) status = BenchFiles::preallocate(file);
    if (!status) return status;
  }
  return unless_interrupted();
}

Status BenchRun::lay_out() {
  for (BenchFile& file : files_.all()) {
    auto status = BenchFiles::remove(file);
    if (status) status = BenchFiles::create_empty(file);
    if (!status) return status;
  }
  auto files = open(Mode::read_write);
  if (!files) return std::unexpected(files.error());
  ++seed_;
  auto order = schedules({.op = Op::write}, false);
  TransferWork work{.op = Op::write, .files = *files, .schedules = order, .content = made_content(seed_)};
  work.on_progress = shown("writing files", 0);
  if (auto moved = ring_->run(work); !moved) return std::unexpected(moved.error());
  Measurement unused;
  if (auto status = sync(*files, unused); !status) return status;
  for (std::size_t index = 0; index < files_.all().size(); ++index) {
    files_.all()[index].complete = true;
    files_.all()[index].pattern = Pattern{.seed = seed_, .file = index};
  }
  return unless_interrupted();
}

// Existing files can be verified when an earlier run left them: their first bytes identify the content.
Status BenchRun::learn_patterns() {
  if (!files_.existing()) return {};
  auto files = open(Mode::read);
  if (!files) return std::unexpected(files.error());
  for (std::size_t index = 0; index < files->size(); ++index) {
    BenchFile& file = files_.all()[index];
    std::byte header[kPatternHeaderBytes];
    std::optional<Pattern> pattern;
    if (file.bytes >= kPatternHeaderBytes) {
      auto bytes = (*files)[index].pread(std::span<std::byte>(header), 0);
      if (!bytes) return std::unexpected(bytes.error());
      pattern = pattern_of_header(header);
    }
    if (!pattern) {
      return std::unexpected(make_error(ErrorKind::corrupt,
                                        fmt::format("--verify: {} does not start as a file that bench laid "
                                                    "out: wrong bytes at offset 0 to {}; make one "
                                                    "with: trunkline bench DIRECTORY --read --keep",
                                                    file.path, kPatternHeaderBytes - 1),
                                        file.path));
    }
    file.pattern = pattern;
  }
  return {};
}

Status BenchRun::drop_page_cache() {
  for (const BenchFile& file : files_.all()) {
    if (auto status = BenchFiles::drop_page_cache(file); !status) return status;
  }
  return {};
}

// ---------------------------------------------------------------------------------------------- one
// measurement

Result<std::vector<File>> BenchRun::open(Mode mode) const {
  std::vector<File> files;
  for (const BenchFile& each : files_.all()) {
    const Mode allowed = each.own ? mode : Mode::read;
    auto file = File::open(engine_, each.path, {.mode = allowed, .direct = options_.direct});
    if (!file) return std::unexpected(file.error());
    files.push_back(std::move(*file));
  }
  return files;
}

std::vector<Schedule> BenchRun::schedules(const Case& what, bool endless) const {
  std::vector<Schedule> result;
  for (const BenchFile& file : files_.all()) {
    Schedule& schedule =
        result.emplace_back(file.bytes, shape_.piece_bytes, options_.order(), seed_ + result.size(), endless);
    if (options_.least_block_bytes) schedule.vary_sizes(*options_.least_block_bytes);
    if (what.read_percent) schedule.mix(*what.read_percent);
  }
  return result;
}

// Writing a new file again would overwrite it, and what was read and written in several mixed passes could
// not be verified, so only the other rows can run for a given time.
bool BenchRun::by_duration(const Case& what) const {
  const bool repeatable = what.op == Op::read || what.write_mode == WriteMode::overwrite;
  return options_.duration_s > 0 && repeatable && !(what.read_percent && options_.verify);
}

// Whether passes may follow each other without a pause: nothing is checked, and no page cache would serve the
// second pass.
bool BenchRun::endless(const Case& what) const {
  return by_duration(what) && !options_.verify && (direct_ || !what.reads());
}

void BenchRun::start_log() const {
  if (extras_.log) engine_.core()->start_latency_logs(LatencyFile::most_transfers() / engine_.config().lanes);
}

Result<Measurement> BenchRun::measure(const Case& what, const std::string& label) {
  if (auto status = prepare(what); !status) return std::unexpected(status.error());
  const bool fresh = what.op == Op::write && what.write_mode == WriteMode::fresh;
  auto files = open(what.op == Op::read ? Mode::read : fresh ? Mode::create : Mode::read_write);
  if (!files) return std::unexpected(files.error());
  Measurement measurement;
  measurement.paths.resize(options_.paths.size());
  Meter meter(engine_);
  start_log();
  Status status;
  bool again = false;
  do {
    if (again && what.reads()) status = drop_page_cache();
    if (status) status = pass(what, *files, label, meter, measurement);
    again = status && by_duration(what) && !endless(what) && meter.usage().seconds < options_.duration_s;
  } while (again);
  measurement.transfers = meter.usage();
  if (extras_.log) measurement.logs = engine_.core()->take_latency_logs();
  if (status && what.writes()) status = sync(*files, measurement);
  for (const File& file : *files) {
    auto closed = file.close();
    if (status) status = closed;
  }
  if (status && what.writes() && options_.verify) status = check_written(what, label);
  if (!status) return std::unexpected(status.error());
  return measurement;
}

// One pass over the files, or passes until the duration is over where they can run without a pause.
Status BenchRun::pass(const Case& what, std::span<const File> files, const std::string& label, Meter& meter,
                      Measurement& measurement) {
  ++seed_;
  auto order = schedules(what, endless(what));
  TransferWork work{
      .op = what.op, .files = files, .schedules = order, .content_apart = options_.verify, .meter = &meter};
  if (options_.verify) work.content = content_of(what);
  if (endless(what)) work.duration_s = options_.duration_s;
  work.on_progress = shown(label, endless(what) ? options_.duration_s : 0);
  auto moved = ring_->run(work);
  if (!moved) return std::unexpected(moved.error());
  measurement.bytes += moved->bytes;
  measurement.bytes_read += moved->bytes_read;
  std::vector<double> path_seconds(measurement.paths.size());
  for (std::size_t index = 0; index < files.size(); ++index) {
    BenchFile& file = files_.all()[index];
    measurement.paths[file.target].bytes += moved->file_bytes[index];
    path_seconds[file.target] = std::max(path_seconds[file.target], moved->file_seconds[index]);
    if (!what.writes()) continue;
    file.complete = true;
    if (options_.verify && what.read_percent) continue;  // check_written() still needs the former pattern
    file.pattern.reset();
    if (options_.verify) file.pattern = Pattern{.seed = seed_, .file = index};
  }
  for (std::size_t path = 0; path < path_seconds.size(); ++path)
    measurement.paths[path].seconds += path_seconds[path];
  return {};
}

// Syncs all files, with one thread per path: disks flush in parallel.
Status BenchRun::sync(std::span<const File> files, Measurement& measurement) const {
  const double cpu_before = process_cpu_seconds();
  const auto began = Clock::now();
  std::vector<Status> statuses(options_.paths.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t target = 0; target < statuses.size(); ++target) {
      threads.emplace_back([&, target] {
        for (std::size_t index = 0; index < files.size(); ++index) {
          if (files_.all()[index].target == target && statuses[target])
            statuses[target] = files[index].sync();
        }
      });
    }
  }
  measurement.sync_seconds = seconds_between(began, Clock::now());
  measurement.sync_cpu_seconds = process_cpu_seconds() - cpu_before;
  for (Status& status : statuses) {
    if (!status) return std::move(status);
  }
  return {};
}

// Reads back from the device what was written, and of mixed passes what was not.
Status BenchRun::check_written(const Case& what, const std::string& label) {
  if (auto status = drop_page_cache(); !status) return status;
  auto files = open(Mode::read);
  if (!files) return std::unexpected(files.error());
  auto order = schedules({.op = Op::read}, false);
  TransferWork work{
      .op = Op::read, .files = *files, .schedules = order, .content = content_of({.op = Op::read})};
  if (what.read_percent) {
    work.content = checked_content(
        files_.all(), [this, percent = *what.read_percent](std::size_t file, const Piece& piece) {
          const bool was_read = mixed_op(percent, seed_ + file, piece.offset) == Op::read;
          return was_read ? *files_.all()[file].pattern : Pattern{.seed = seed_, .file = file};
        });
  }
  work.on_progress = shown(label + ", reading back", 0);
  auto moved = ring_->run(work);
  for (BenchFile& file : files_.all()) {
    if (what.read_percent) file.pattern.reset();  // two of them
  }
  if (!moved) return std::unexpected(moved.error());
  return {};
}

Content BenchRun::content_of(const Case& what) const {
  Content read = checked_content(
      files_.all(), [this](std::size_t file, const Piece&) { return *files_.all()[file].pattern; });
  if (what.op == Op::read) return read;
  Content written = made_content(seed_);
  return what.read_percent ? mixed_content(std::move(written), std::move(read)) : written;
}

std::function<void(std::uint64_t)> BenchRun::shown(const std::string& label, double duration_s) {
  progress_.begin(label, files_.total_bytes(), duration_s, Clock::now());
  return [this](std::uint64_t bytes) { progress_.update(bytes, Clock::now()); };
}

}  // namespace trunkline::cli
