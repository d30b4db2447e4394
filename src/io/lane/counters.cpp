#include "io/lane/counters.h"

#include <utility>

namespace trunkline::io {

void Counters::count_completion(const Transfer& transfer, const Outcome& outcome, std::uint64_t took_ns) {
  const std::scoped_lock lock(mutex_);
  ++stats_.transfers;
  stats_.retries += outcome.retried ? 1 : 0;
  stats_.short_resumes += outcome.resumed ? 1 : 0;
  stats_.direct_refusals += outcome.refused_direct ? 1 : 0;
  if (transfer.op == Op::read) stats_.read_latency.add(took_ns);
  if (transfer.op == Op::write) stats_.write_latency.add(took_ns);
  if (latencies_ && transfer.op != Op::sync) {
    latencies_->add({.submitted_ns = transfer.submitted_ns,
                     .took_ns = took_ns,
                     .offset = transfer.piece.offset,
                     .bytes = transfer.piece.length,
                     .op = transfer.op});
  }
  if (reads_in_flight_ && transfer.op == Op::read) {
    const auto begin = static_cast<std::int64_t>(transfer.submitted_ns);
    reads_in_flight_->add(begin, begin + static_cast<std::int64_t>(took_ns), transfer.piece.length);
  }
}

void Counters::start_latency_log(std::size_t most) {
  const std::scoped_lock lock(mutex_);
  latencies_.emplace(most);
}

LatencyLog Counters::take_latency_log() {
  const std::scoped_lock lock(mutex_);
  LatencyLog taken = std::move(latencies_).value_or(LatencyLog(0));
  latencies_.reset();
  return taken;
}

void Counters::start_reads_in_flight(std::int64_t now) {
  const std::scoped_lock lock(mutex_);
  reads_in_flight_.emplace(now);
}

std::optional<ReadsInFlight> Counters::take_reads_in_flight() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(reads_in_flight_, std::nullopt);
}

void Counters::count_payload(IoPath path, std::uint64_t bytes) {
  const std::scoped_lock lock(mutex_);
  switch (path) {
    case IoPath::direct:
      stats_.bytes_direct += bytes;
      return;
    case IoPath::bounced:
      stats_.bytes_bounced += bytes;
      return;
    case IoPath::buffered:
      stats_.bytes_buffered += bytes;
      return;
    case IoPath::gds:
      stats_.bytes_gds += bytes;
      return;
  }
}

void Counters::count_operation(bool failed, bool inlined) {
  const std::scoped_lock lock(mutex_);
  ++stats_.operations;
  stats_.errors += failed ? 1 : 0;
  stats_.inline_operations += inlined ? 1 : 0;
}

void Counters::add_to(EngineStats& sum) const {
  const std::scoped_lock lock(mutex_);
  sum.bytes_direct += stats_.bytes_direct;
  sum.bytes_bounced += stats_.bytes_bounced;
  sum.bytes_buffered += stats_.bytes_buffered;
  sum.bytes_gds += stats_.bytes_gds;
  sum.operations += stats_.operations;
  sum.transfers += stats_.transfers;
  sum.inline_operations += stats_.inline_operations;
  sum.retries += stats_.retries;
  sum.short_resumes += stats_.short_resumes;
  sum.direct_refusals += stats_.direct_refusals;
  sum.errors += stats_.errors;
  sum.read_latency.add(stats_.read_latency);
  sum.write_latency.add(stats_.write_latency);
}

}  // namespace trunkline::io
