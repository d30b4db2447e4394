// Commands on files that live in memory (see MemoryFiles), executed immediately: for tests that should not
// depend on a disk.
#include <condition_variable>
#include <mutex>

#include "io/backends/backend.h"
#include "io/backends/run_command.h"

namespace trunkline::io {
namespace {

class MemoryBackend final : public Backend {
 public:
  void push(const Command& command) override { done_.push_back({command.tag, run_command(command)}); }

  void reap(std::vector<Completion>& completions, unsigned /*wanted*/) override {
    if (done_.empty()) {
      std::unique_lock lock(mutex_);
      waking_.wait(lock, [this] { return woken_; });
      woken_ = false;
    }
    completions.insert(completions.end(), done_.begin(), done_.end());
    done_.clear();
  }

  void wake() override {
    {
      const std::scoped_lock lock(mutex_);
      woken_ = true;
    }
    waking_.notify_one();
  }

 private:
  std::vector<Completion> done_;  // used by the lane's thread only
  std::mutex mutex_;
  std::condition_variable waking_;
  bool woken_ = false;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_memory_backend(unsigned depth) {
  (void)depth;
  return std::make_unique<MemoryBackend>();
}

}  // namespace trunkline::io
