// Counters of one lane, or of all inline callers.
#pragma once

#include <mutex>

#include "io/lane/transfer.h"
#include "trunkline/stats.h"

namespace trunkline::io {

class Counters {
 public:
  void count_completion(const Transfer& transfer, const Verdict& verdict, std::uint64_t took_ns);
  void count_payload(IoPath path, bool through_cache, std::uint64_t bytes);
  void count_operation(bool failed, bool inlined);
  void add_to(EngineStats& sum) const;

 private:
  mutable std::mutex mutex_;
  EngineStats stats_;
};

}  // namespace trunkline::io
