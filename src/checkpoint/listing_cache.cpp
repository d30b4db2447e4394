#include "checkpoint/listing_cache.h"

#include <algorithm>
#include <utility>

namespace trunkline::checkpoint {
namespace {

// More than the coarsest resolution of a folder's times.
constexpr time_t kSettledSeconds = 3;

bool is_same_time(const timespec& a, const timespec& b) {
  return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

}  // namespace

ListingCache::ListingCache(Clock clock) : clock_(std::move(clock)) {}

timespec ListingCache::realtime_clock() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return now;
}

const std::vector<std::uint64_t>* ListingCache::find(std::uint64_t step, const struct stat& status) const {
  const auto found = folders_.find(step);
  if (found == folders_.end()) return nullptr;
  const struct stat& before = found->second.status;
  const bool is_same = before.st_dev == status.st_dev && before.st_ino == status.st_ino &&
                       is_same_time(before.st_mtim, status.st_mtim) &&
                       is_same_time(before.st_ctim, status.st_ctim);
  return is_same ? &found->second.commits : nullptr;
}

void ListingCache::add(std::uint64_t step, const struct stat& status,
                       const std::vector<std::uint64_t>& commits) {
  ++reads_;
  const time_t changed = std::max(status.st_mtim.tv_sec, status.st_ctim.tv_sec);
  if (clock_().tv_sec - changed > kSettledSeconds)
    folders_.insert_or_assign(step, Folder{.status = status, .commits = commits});
  else
    folders_.erase(step);
}

void ListingCache::retain(const std::vector<std::uint64_t>& steps) {
  std::erase_if(folders_, [&](const auto& each) { return !std::ranges::binary_search(steps, each.first); });
}

}  // namespace trunkline::checkpoint
