#include "os/page_cache.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace trunkline::os {
namespace {

// cachestat(2), which headers before Linux 6.5 lack. The number is the same on all architectures.
constexpr long kCachestat = 451;

struct CachestatRange {
  std::uint64_t offset = 0;
  std::uint64_t length = 0;  // 0: until the end
};

struct Cachestat {  // in pages
  std::uint64_t cached;
  std::uint64_t dirty;
  std::uint64_t in_writeback;
  std::uint64_t evicted;
  std::uint64_t recently_evicted;
};

}  // namespace

std::optional<std::uint64_t> cached_bytes(int fd) {
  CachestatRange whole;
  Cachestat found{};
  if (::syscall(kCachestat, fd, &whole, &found, 0) != 0) return std::nullopt;
  return found.cached * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace trunkline::os
