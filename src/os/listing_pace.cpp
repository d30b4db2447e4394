#include "os/listing_pace.h"

namespace trunkline::os {

// Never 0, which marks an entry that is free.
std::uint64_t ListingPace::key_of(const struct stat& directory) {
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15U;  // of Fibonacci hashing: 2^64 / golden ratio
  return ((directory.st_dev * kOdd) ^ directory.st_ino) * kOdd | 1U;
}

bool ListingPace::is_due(const struct stat& directory, Nanoseconds now) const {
  const std::uint64_t key = key_of(directory);
  const Entry& entry = entries_[(key >> 32U) % entries_.size()];
  return entry.directory.load() != key || now >= entry.due.load();
}

void ListingPace::listed(const struct stat& directory, std::size_t names, Nanoseconds began,
                         Nanoseconds ended) {
  const std::uint64_t key = key_of(directory);
  Entry& entry = entries_[(key >> 32U) % entries_.size()];
  if (names <= kFewNames) {
    if (entry.directory.load() == key) entry.due = ended;
    return;
  }
  entry.due = ended + kRest * (ended - began);
  entry.directory = key;
}

}  // namespace trunkline::os
