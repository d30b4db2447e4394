// Counters of one lane, or of all inline callers.
#pragma once

#include <mutex>

#include "io/lane/transfer.h"
#include "trunkline/stats.h"

namespace trunkline::io {

class Counters {
 public:
  void count_completion(const Transfer& transfer, const Outcome& outcome, std::uint64_t took_ns);
  // `path`: Transfer::effective_path().
  void count_payload(IoPath path, std::uint64_t bytes);
  void count_operation(bool failed, bool inlined);
  void add_to(EngineStats& sum) const;

 private:
  mutable std::mutex mutex_;
  EngineStats stats_;
};

}  // namespace trunkline::io
