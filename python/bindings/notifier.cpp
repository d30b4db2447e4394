#include "notifier.h"

#include <nanobind/nanobind.h>

#include <system_error>

#include "gil.h"
#include "os/fork_generation.h"

namespace trunkline::python {

namespace nb = nanobind;

Notifier& Notifier::instance() {
  // Never destroyed: lanes may push until the process ends. A forked child abandons its parent's notifier:
  // the child does not have its thread, and its mutex may have been locked at the fork.
  static std::shared_ptr<Notifier>* current = nullptr;
  static unsigned generation = 0;
  if (current == nullptr || generation != os::fork_generation()) {
    current = new std::shared_ptr<Notifier>(std::make_shared<Notifier>());
    generation = os::fork_generation();
  }
  return **current;
}

Status Notifier::when_done(Future future, std::unique_ptr<Task>& task) {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      static_cast<void>(task.release());
      return {};
    }
    if (!thread_.joinable()) {
      try {
        thread_ = std::thread([this] { run(); });
      } catch (const std::system_error& error) {
        return std::unexpected(system_error(error.code().value(), "start the thread that runs callbacks"));
      }
    }
    ++pending_;
    waiting_.emplace(task.get(), future);
  }
  // std::function requires a copyable callable. It is called exactly once, so a plain pointer can carry the
  // task.
  future.on_done(
      [notifier = shared_from_this(), raw = task.release()] { notifier->push(std::unique_ptr<Task>(raw)); });
  return {};
}

void Notifier::push(std::unique_ptr<Task> task) {
  const std::lock_guard lock(mutex_);
  waiting_.erase(task.get());
  if (aborted_) {
    static_cast<void>(task.release());
    return;
  }
  tasks_.push_back(std::move(task));
  ready_.notify_one();
}

void Notifier::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    ready_.wait(lock, [this] { return aborted_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::vector<std::unique_ptr<Task>> due = std::move(tasks_);
    tasks_.clear();
    lock.unlock();
    const std::size_t count = due.size();
    {
      const nb::gil_scoped_acquire locked;
      for (const std::unique_ptr<Task>& task : due) task->run();
      due.clear();  // tasks own Python objects
    }
    lock.lock();
    pending_ -= count;
    if (pending_ == 0) drained_.notify_all();
  }
}

bool Notifier::drained(std::chrono::milliseconds timeout) {
  const GilReleased unlocked;
  std::unique_lock lock(mutex_);
  return drained_.wait_for(lock, timeout, [this] { return pending_ == 0; });
}

std::vector<Future> Notifier::pending() {
  const std::lock_guard lock(mutex_);
  std::vector<Future> futures;
  for (const auto& [task, future] : waiting_) futures.push_back(future);
  return futures;
}

void Notifier::stop() {
  const GilReleased unlocked;
  bool idle = false;
  {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    idle = pending_ == 0;
  }
  ready_.notify_one();
  if (!thread_.joinable()) return;
  if (idle) {
    thread_.join();
  } else {
    thread_.detach();  // the wait for the pending operations was given up
  }
}

}  // namespace trunkline::python
