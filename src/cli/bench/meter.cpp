#include "cli/bench/meter.h"

#include <sys/resource.h>

#include <algorithm>
#include <array>

namespace trunkline::cli {
namespace {

using Counter = std::uint64_t EngineStats::*;
constexpr std::array<Counter, 11> kCounters{&EngineStats::bytes_direct,   &EngineStats::bytes_bounced,
                                            &EngineStats::bytes_buffered, &EngineStats::bytes_gds,
                                            &EngineStats::operations,     &EngineStats::transfers,
                                            &EngineStats::retries,        &EngineStats::inline_operations,
                                            &EngineStats::short_resumes,  &EngineStats::direct_refusals,
                                            &EngineStats::errors};

double to_seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

}  // namespace

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

double process_cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return to_seconds(usage.ru_utime) + to_seconds(usage.ru_stime);
}

EngineStats difference(const EngineStats& after, const EngineStats& before) {
  EngineStats result = after;
  for (const Counter counter : kCounters) result.*counter -= before.*counter;
  result.read_latency.subtract(before.read_latency);
  result.write_latency.subtract(before.write_latency);
  return result;
}

void accumulate(EngineStats& total, const EngineStats& part) {
  for (const Counter counter : kCounters) total.*counter += part.*counter;
  total.read_latency.add(part.read_latency);
  total.write_latency.add(part.write_latency);
  total.pinned_bytes = std::max(total.pinned_bytes, part.pinned_bytes);
  total.peak_pinned_bytes = std::max(total.peak_pinned_bytes, part.peak_pinned_bytes);
}

void Meter::start() {
  before_ = engine_.stats();
  cpu_before_ = process_cpu_seconds();
  started_ = Clock::now();
}

void Meter::stop(Clock::time_point last_completion) {
  usage_.cpu_seconds += process_cpu_seconds() - cpu_before_;
  usage_.seconds += std::max(0.0, seconds_between(started_, last_completion));
  accumulate(usage_.stats, difference(engine_.stats(), before_));
}

}  // namespace trunkline::cli
