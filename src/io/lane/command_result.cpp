#include "io/lane/command_result.h"

#include <fmt/format.h>

#include <string>

#include "base/log.h"
#include "base/trace.h"
#include "io/file/file_core.h"
#include "io/lane/transfer_trace.h"

namespace trunkline::io {
namespace {

// Commands that are repeated or resumed slow down the others.
void log_unusual(const Transfer& transfer, const Outcome& outcome, std::int64_t result) {
  const std::string& path = transfer.member->path;
  if (outcome.refused_direct) {
    if (!transfer.member->direct_refused.exchange(true))
      log::info(log::Component::engine, "{}: direct I/O was refused (EINVAL); the page cache is used", path);
    return;
  }
  static log::RateLimit limit;
  if (!log::is_enabled(log::Component::engine, log::Level::info)) return;
  const auto held_back = limit.admit();
  if (!held_back) return;
  log::info(log::Component::engine, "{}: {} at {} ({} more of these in between)", path,
            outcome.retried ? fmt::format("{}, repeated", errno_name(static_cast<int>(-result)))
                            : fmt::format("moved {} bytes, resumed", result),
            transfer.piece.offset, *held_back);
}

}  // namespace

std::uint64_t now_ns() { return trace::now(); }

Outcome handle_result(Transfer& transfer, std::int64_t result, std::uint64_t ended_ns, Counters& counters) {
  Outcome outcome = advance(transfer, result);
  counters.count_completion(transfer, outcome, ended_ns - transfer.submitted_ns);
  if (trace::is_on()) trace_command(transfer, outcome, result, ended_ns);
  if (outcome.step == Outcome::Step::resubmit) log_unusual(transfer, outcome, result);
  return outcome;
}

}  // namespace trunkline::io
