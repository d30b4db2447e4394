// The one thread that runs Python code when operations complete, so that the lanes never wait for the GIL.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "trunkline/future.h"

namespace trunkline::python {

class Notifier : public std::enable_shared_from_this<Notifier> {
 public:
  // Runs and is destroyed on the notifier's thread, under the GIL; must not throw.
  class Task {
   public:
    Task() = default;
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;
    virtual ~Task() = default;
    virtual void run() = 0;
  };

  // This process's notifier; a forked child gets a fresh one. Needs the GIL.
  static Notifier& instance();

  // Runs `task` once `future` is done. The first call starts the thread; if it cannot, the task stays with
  // the caller. Needs the GIL.
  Status when_done(Future future, std::unique_ptr<Task>& task);

  // Waits up to `timeout`, without the GIL, until all tasks have ended, also those of pending operations;
  // returns whether they have.
  bool drained(std::chrono::milliseconds timeout);

  // Of the tasks that wait for their operations: these.
  std::vector<Future> pending();

  // Ends the thread. Tasks that come later are dropped with what they own: at the interpreter's exit, which
  // is the only time to call this, that is safe and freeing is not. Needs the GIL.
  void stop();

 private:
  void push(std::unique_ptr<Task> task);
  void run();

  std::mutex mutex_;
  std::condition_variable ready_;    // tasks_ has some, or aborted_
  std::condition_variable drained_;  // pending_ is 0
  std::vector<std::unique_ptr<Task>> tasks_;
  std::size_t pending_ = 0;  // tasks that were handed in and have not ended
  std::unordered_map<const Task*, Future> waiting_;
  bool aborted_ = false;
  std::thread thread_;
};

}  // namespace trunkline::python
