// Releases the GIL around a call that may block.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "os/fork_generation.h"

namespace trunkline::python {

// On Linux the thread whose id is the process's is the main one. Python runs signal handlers only there. The
// thread that forks is the main one of the child.
inline bool on_main_thread() {
  // Cached: both ids are system calls, which would show in the time to open a cached file.
  struct Known {
    unsigned generation;
    bool main;
  };
  thread_local Known known{os::fork_generation(), gettid() == getpid()};
  if (known.generation != os::fork_generation()) known = {os::fork_generation(), gettid() == getpid()};
  return known.main;
}

// Releases the GIL for its lifetime.
//
// Before Python 3.14, a daemon thread that requests the GIL while the interpreter is finalizing is ended by
// pthread_exit, whose unwinding ends in std::terminate when it meets C++ frames like those of a binding. So,
// once hold_back_other_threads() was called, threads other than the main one sleep here until the process is
// gone.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;
  ~GilReleased() {
    returning_.fetch_add(1);
    if (held_back_.load() && !on_main_thread()) {
      returning_.fetch_sub(1);
      while (true) pause();
    }
    PyEval_RestoreThread(state_);
    returning_.fetch_sub(1);
  }

  // For the exit of the interpreter. Threads that have requested the GIL already still get it. Needs the GIL.
  static void hold_back_other_threads() {
    held_back_.store(true);
    // The bound is for a forked child, which inherits the count but not the threads.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (returning_.load() != 0 && std::chrono::steady_clock::now() < deadline) {
      PyThreadState* state = PyEval_SaveThread();
      usleep(100);
      PyEval_RestoreThread(state);
    }
  }

 private:
  inline static std::atomic<bool> held_back_{false};
  inline static std::atomic<int> returning_{0};  // threads between here and the GIL

  PyThreadState* state_;
};

}  // namespace trunkline::python
