// Several threads that do the same work.
#pragma once

#include <cstddef>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

namespace trunkline {

// Starts `count` threads that each call `work`; fewer where the system cannot create that many.
inline std::vector<std::jthread> start_threads(std::size_t count, const std::function<void()>& work) {
  std::vector<std::jthread> threads;
  while (threads.size() < count) {
    try {
      threads.emplace_back(work);
    } catch (const std::system_error&) {
      break;
    }
  }
  return threads;
}

// Calls `work` on this thread and on up to `count` - 1 others; returns when all calls have returned.
inline void side_by_side(std::size_t count, const std::function<void()>& work) {
  const auto others = start_threads(count > 0 ? count - 1 : 0, work);
  work();
}

}  // namespace trunkline
