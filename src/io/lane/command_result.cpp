#include "io/lane/command_result.h"

#include <fmt/format.h>

#include <string>

#include "base/log.h"
#include "base/trace.h"
#include "io/file/file_core.h"
#include "io/lane/transfer_trace.h"

namespace trunkline::io {
namespace {

// What is unusual about a command, for who looks for what makes the others slow.
void log_unusual(const Transfer& transfer, const Verdict& verdict, std::int64_t result) {
  const std::string& path = transfer.member->path;
  if (verdict.refused_direct) {
    if (!transfer.member->direct_refused.exchange(true))
      log::info(log::Component::engine, "{}: direct I/O was refused (EINVAL); the page cache is used", path);
    return;
  }
  static log::RateLimit limit;
  if (!log::is_enabled(log::Component::engine, log::Level::info)) return;
  const auto held_back = limit.admit();
  if (!held_back) return;
  log::info(log::Component::engine, "{}: {} at {} ({} more of these in between)", path,
            verdict.retried ? fmt::format("{}, repeated", errno_name(static_cast<int>(-result)))
                            : fmt::format("moved {} bytes, resumed", result),
            transfer.piece.offset, *held_back);
}

}  // namespace

std::uint64_t now_ns() { return trace::now(); }

Verdict judge(Transfer& transfer, std::int64_t result, Counters& counters) {
  const std::uint64_t now = now_ns();
  Verdict verdict = advance(transfer, result);
  counters.count_completion(transfer, verdict, now - transfer.sent_ns);
  if (trace::is_on()) trace_command(transfer, verdict, result, now);
  if (verdict.step == Verdict::Step::again) log_unusual(transfer, verdict, result);
  return verdict;
}

}  // namespace trunkline::io
