#include "os/fork_generation.h"

#include <pthread.h>

#include <atomic>

namespace trunkline::os {
namespace {

std::atomic<unsigned> generation{0};

void count_child() { generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

unsigned fork_generation() {
  // Registered at first use: code that compares generations has called this before any fork that matters to
  // it.
  static const int registered = pthread_atfork(nullptr, nullptr, count_child);
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace trunkline::os
