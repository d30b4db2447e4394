#include "cli/tune/trial_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <thread>

#include "cli/bench/meter.h"
#include "cli/bench/pattern.h"
#include "cli/bench/transfer_ring.h"
#include "cli/interrupt.h"
#include "os/environment.h"
#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

constexpr std::uint64_t kMostMemory = 512 * kMiB;
constexpr std::uint64_t kLeastMemory = 128 * kMiB;
constexpr double kFirstGuess = 200e6;   // bytes per second, before anything was measured
constexpr std::uint64_t kRequests = 8;  // of a file in a measurement, at least

constexpr std::array<TrialPattern, tuning::kPatterns> kPatterns{{{Op::read, Order::sequential},
                                                                 {Op::write, Order::sequential},
                                                                 {Op::read, Order::random},
                                                                 {Op::write, Order::random}}};

Status sync(std::span<const File> files) {
  std::vector<Status> statuses(files.size());
  {
    std::vector<std::jthread> threads;  // disks flush in parallel
    for (std::size_t index = 0; index < files.size(); ++index)
      threads.emplace_back([&, index] { statuses[index] = files[index].sync(); });
  }
  for (Status& each : statuses) {
    if (!each) return std::move(each);
  }
  return {};
}

Result<Engine> engine_of(const Candidate& candidate) {
  return Engine::create({.backend = candidate.backend,
                         .lanes = candidate.lanes,
                         .queue_depth = candidate.queue_depth,
                         .block_bytes = candidate.block_bytes});
}

}  // namespace

TrialPattern pattern_at(std::size_t index) { return kPatterns.at(index); }

RingShape trial_shape(const Candidate& candidate, Order order, std::uint64_t files, std::uint64_t bytes,
                      std::uint64_t memory_bytes) {
  const std::uint64_t block = order == Order::sequential ? candidate.block_bytes : kRandomBytes;
  RingShape shape = ring_shape(order, files,
                               {.block_bytes = block,
                                .in_flight = std::uint64_t{candidate.lanes} * candidate.queue_depth,
                                .memory_bytes = memory_bytes});
  // Several batches for each file, so that none waits for a whole pass.
  const std::uint64_t most_blocks = std::max<std::uint64_t>(1, bytes / files / 4 / block);
  if (order == Order::sequential)
    shape.piece_bytes = block * std::min(most_blocks, shape.piece_bytes / block);
  else
    shape.pieces = std::min(most_blocks, shape.pieces);
  while (shape.bytes(files) > memory_bytes) {
    if (shape.batches_per_file > 1)
      --shape.batches_per_file;
    else if (shape.pieces > 1)
      shape.pieces /= 2;
    else if (shape.piece_bytes > block)
      shape.piece_bytes = std::max(block, shape.piece_bytes / 2 / block * block);
    else
      break;
  }
  return shape;
}

Result<TrialBench> TrialBench::create(const ScratchFiles& files) {
  const std::uint64_t available = os::free_memory_bytes();
  const std::uint64_t least = std::max(kLeastMemory, files.paths().size() * 16 * kMiB);
  auto memory = Buffer::allocate(std::max(least, std::min(kMostMemory, available / 8 / kMiB * kMiB)));
  if (!memory) return std::unexpected(memory.error());
  fill_pattern({}, 0, memory->span());  // content that no device can compress
  return TrialBench(files, std::move(*memory));
}

Result<std::vector<File>> TrialBench::open(const Engine& engine, Op op, bool direct) const {
  std::vector<File> files;
  for (const std::string& path : files_.paths()) {
    auto file = File::open(engine, path,
                           {.mode = op == Op::read ? Mode::read : Mode::read_write,
                            .direct = direct ? Direct::always : Direct::never});
    if (!file) return std::unexpected(file.error());
    files.push_back(std::move(*file));
  }
  return files;
}

Status TrialBench::lay_out(const Candidate& candidate, std::uint64_t bytes, double most_s,
                           const std::function<void(std::uint64_t bytes_done)>& wrote) {
  auto engine = engine_of(candidate);
  if (!engine) return std::unexpected(engine.error());
  auto files = open(*engine, Op::write, candidate.direct);
  if (!files) return std::unexpected(files.error());
  constexpr std::uint64_t kStep = 64 * kMiB;
  const auto began = Clock::now();
  const RingShape shape =
      trial_shape(candidate, Order::sequential, files->size(), kStep * files->size(), memory_.size());
  const auto ring = TransferRing::create(*engine, shape, memory_.span(), files->size());
  const std::uint64_t step = std::max(kStep / shape.piece_bytes, std::uint64_t{1});  // pieces
  while (file_bytes_ + step * shape.piece_bytes <= bytes) {
    if (interrupted()) return std::unexpected(make_error(ErrorKind::cancelled, "interrupted"));
    std::vector<Schedule> schedules;
    for (std::size_t index = 0; index < files->size(); ++index) {
      schedules.emplace_back(bytes, shape.piece_bytes, Order::sequential, 1, false);
      schedules.back().restrict_to(file_bytes_ / shape.piece_bytes, step);
    }
    const TransferWork work{.op = Op::write, .files = *files, .schedules = schedules};
    if (auto moved = ring->run(work); !moved) return std::unexpected(moved.error());
    file_bytes_ += step * shape.piece_bytes;
    wrote(file_bytes_ * files->size());
    if (seconds_between(began, Clock::now()) > most_s) break;
  }
  if (auto synced = sync(*files); !synced) return synced;
  const double seconds = seconds_between(began, Clock::now());
  fastest_.fill(static_cast<double>(file_bytes_ * files->size()) / std::max(seconds, 1e-6));
  return {};
}

Result<double> TrialBench::measure_pattern(const Engine& engine, const Candidate& candidate,
                                           std::size_t pattern, double seconds) {
  const auto [op, order] = pattern_at(pattern);
  const double rate = fastest_.at(pattern) > 0 ? fastest_.at(pattern) : kFirstGuess;
  const auto wanted = static_cast<std::uint64_t>(rate * seconds);
  auto files = open(engine, op, candidate.direct);
  if (!files) return std::unexpected(files.error());
  if (op == Op::read && !candidate.direct) {
    if (auto dropped = files_.drop_page_cache(); !dropped) return std::unexpected(dropped.error());
  }
  const RingShape shape = trial_shape(candidate, order, files->size(), wanted, memory_.size());
  const std::uint64_t count = std::max(wanted / files->size() / shape.piece_bytes, kRequests);
  // What was read a moment ago must not be served from the page cache.
  const bool endless = candidate.direct || op == Op::write;
  std::vector<Schedule> schedules;
  ++seed_;
  for (std::size_t index = 0; index < files->size(); ++index) {
    schedules.emplace_back(file_bytes_, shape.piece_bytes, order, seed_ + index, endless);
    schedules.back().restrict_to(endless && order == Order::sequential ? position_ / shape.piece_bytes : 0,
                                 count);
  }
  position_ += count * shape.piece_bytes;
  const auto ring = TransferRing::create(engine, shape, memory_.span(), files->size());
  Meter meter(engine);
  const TransferWork work{.op = op,
                          .files = *files,
                          .schedules = schedules,
                          .duration_s = 3 * seconds,  // for a candidate that is much slower
                          .meter = &meter};
  auto moved = ring->run(work);
  if (!moved) return std::unexpected(moved.error());
  double took = meter.usage().seconds;
  if (op == Op::write) {
    const auto began = Clock::now();
    if (auto synced = sync(*files); !synced) return std::unexpected(synced.error());
    took += seconds_between(began, Clock::now());
  }
  return static_cast<double>(moved->bytes) / std::max(took, 1e-9);
}

Result<PatternRates> TrialBench::measure(const Candidate& candidate, double seconds) {
  auto engine = engine_of(candidate);
  if (!engine) return std::unexpected(engine.error());
  PatternRates rates{};
  for (std::size_t pattern = 0; pattern < rates.size(); ++pattern) {
    if (interrupted()) return std::unexpected(make_error(ErrorKind::cancelled, "interrupted"));
    const auto rate = measure_pattern(*engine, candidate, pattern, seconds);
    if (!rate) return std::unexpected(rate.error());
    rates.at(pattern) = std::max(*rate, 1.0);
    fastest_.at(pattern) = std::max(fastest_.at(pattern), *rate);
  }
  return rates;
}

}  // namespace trunkline::cli
