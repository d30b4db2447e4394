#include "io/lane/judge.h"

#include <chrono>

#include "io/file/file_core.h"

namespace trunkline::io {

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

Verdict judge(Transfer& transfer, std::int64_t result, Counters& counters) {
  const std::uint64_t now = now_ns();
  Verdict verdict = advance(transfer, result);
  counters.count_completion(transfer, verdict, now - transfer.sent_ns);
  if (verdict.refused_direct) transfer.member->direct_refused.store(true);
  return verdict;
}

}  // namespace trunkline::io
