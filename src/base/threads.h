// Several threads for one kind of work.
#pragma once

#include <cstddef>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

namespace trunkline {

// `count` threads that call `work` each; fewer where the system grants no more of them.
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

// Calls `work` on this thread and on up to `count` - 1 others; returns when all calls have.
inline void side_by_side(std::size_t count, const std::function<void()>& work) {
  const auto others = start_threads(count > 0 ? count - 1 : 0, work);
  work();
}

}  // namespace trunkline
