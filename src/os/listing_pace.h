// How often a process lists directories of many files.
#pragma once

#include <sys/stat.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace trunkline::os {

// The directories that have many files, and when each may be listed again. Thread-safe without locks, so that
// a process that forks meanwhile does not inherit one that is held.
class ListingPace {
 public:
  static constexpr std::size_t kFewNames = 1000;  // are listed each time
  static constexpr unsigned kRest = 100;          // listings' time, until the next one

  // Of a file's identity and a monotonic clock.
  using Nanoseconds = std::uint64_t;
  bool is_due(const struct stat& directory, Nanoseconds now) const;
  void listed(const struct stat& directory, std::size_t names, Nanoseconds began, Nanoseconds ended);

 private:
  // Two directories that share an entry are listed more often than needed.
  struct Entry {
    std::atomic<std::uint64_t> directory = 0;
    std::atomic<Nanoseconds> due = 0;
  };
  static std::uint64_t key_of(const struct stat& directory);

  std::array<Entry, 64> entries_;
};

}  // namespace trunkline::os
