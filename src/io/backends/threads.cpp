// A few threads that call pread and pwrite: works on any file.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "io/backends/backend.h"
#include "io/backends/run_command.h"

namespace trunkline::io {
namespace {

constexpr unsigned kMaxThreads = 16;  // per lane; each keeps one command in flight

class ThreadsBackend final : public Backend {
 public:
  explicit ThreadsBackend(unsigned depth) : max_threads_(std::min(depth, kMaxThreads)) {}
  ThreadsBackend(const ThreadsBackend&) = delete;
  ThreadsBackend& operator=(const ThreadsBackend&) = delete;
  ~ThreadsBackend() override {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // The probe: one thread can be started.
  Status set_up() { return start_thread(); }

  void push(const Command& command) override {
    bool short_of_threads = false;
    {
      const std::scoped_lock lock(mutex_);
      commands_.push_back(command);
      short_of_threads = commands_.size() > idle_ && threads_.size() < max_threads_;
    }
    // Failure (RLIMIT_NPROC) is harmless: the running threads will process the command.
    if (short_of_threads) [[maybe_unused]]
      const Status started = start_thread();
    work_.notify_one();
  }

  void reap(std::vector<Completion>& completions, unsigned /*wanted*/) override {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return woken_ || !completions_.empty(); });
    woken_ = false;
    completions.insert(completions.end(), completions_.begin(), completions_.end());
    completions_.clear();
  }

  void wake() override {
    {
      const std::scoped_lock lock(mutex_);
      woken_ = true;
    }
    done_.notify_one();
  }

 private:
  Status start_thread() {
    try {
      threads_.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {
      return std::unexpected(system_error(error.code().value(), "start an I/O thread"));
    }
    return {};
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      ++idle_;
      work_.wait(lock, [this] { return stopping_ || !commands_.empty(); });
      --idle_;
      if (commands_.empty()) return;
      const Command command = commands_.front();
      commands_.pop_front();
      lock.unlock();
      const std::int64_t result = run_command(command);
      lock.lock();
      completions_.push_back({command.tag, result});
      done_.notify_one();
    }
  }

  const unsigned max_threads_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<Command> commands_;
  std::vector<Completion> completions_;
  std::size_t idle_ = 0;
  bool stopping_ = false;
  bool woken_ = false;
  std::vector<std::thread> threads_;  // used by the lane's thread only
};

}  // namespace

Result<std::unique_ptr<Backend>> make_threads_backend(unsigned depth) {
  auto backend = std::make_unique<ThreadsBackend>(depth);
  if (auto status = backend->set_up(); !status) return std::unexpected(status.error());
  return backend;
}

}  // namespace trunkline::io
