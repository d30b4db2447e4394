#include "device/blocking_copies.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace trunkline {

class BlockingCopies::Signal {
 public:
  void notify() {
    const std::scoped_lock lock(mutex_);
    set_ = true;
    changed_.notify_one();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return std::exchange(set_, false); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

BlockingCopies::BlockingCopies() : completed_(std::make_unique<Signal>()) {}
BlockingCopies::BlockingCopies(BlockingCopies&&) noexcept = default;
BlockingCopies& BlockingCopies::operator=(BlockingCopies&& other) noexcept {
  queue_ = std::move(other.queue_);
  completed_ = std::move(other.completed_);
  return *this;
}
BlockingCopies::~BlockingCopies() = default;

Result<BlockingCopies> BlockingCopies::open(Device& device) {
  BlockingCopies copies;
  auto queue = device.open_queue([completed = copies.completed_.get()] { completed->notify(); });
  if (!queue) return std::unexpected(queue.error());
  copies.queue_ = std::move(*queue);
  return copies;
}

Status BlockingCopies::copy(Direction direction, std::byte* host, std::byte* device, std::uint64_t bytes) {
  queue_->start({.direction = direction, .host = host, .device = device, .bytes = bytes, .after = {}});
  queue_->send();
  std::vector<CopyQueue::Completion> completions;
  while (completions.empty()) {
    queue_->take(completions);
    if (completions.empty()) completed_->wait();
  }
  std::optional<Error>& error = completions.front().error;
  if (error) return std::unexpected(std::move(*error));
  return {};
}

}  // namespace trunkline
