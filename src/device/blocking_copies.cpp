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

BlockingCopies::BlockingCopies() : ended_(std::make_unique<Signal>()) {}
BlockingCopies::BlockingCopies(BlockingCopies&&) noexcept = default;
BlockingCopies& BlockingCopies::operator=(BlockingCopies&& other) noexcept {
  queue_ = std::move(other.queue_);
  ended_ = std::move(other.ended_);
  return *this;
}
BlockingCopies::~BlockingCopies() = default;

Result<BlockingCopies> BlockingCopies::open(Device& device) {
  BlockingCopies copies;
  auto queue = device.open_queue([ended = copies.ended_.get()] { ended->notify(); });
  if (!queue) return std::unexpected(queue.error());
  copies.queue_ = std::move(*queue);
  return copies;
}

Status BlockingCopies::copy(Direction direction, std::byte* host, std::byte* device, std::uint64_t bytes) {
  queue_->start({.direction = direction, .host = host, .device = device, .bytes = bytes, .after = {}});
  queue_->send();
  std::vector<CopyQueue::Ended> ended;
  while (ended.empty()) {
    queue_->take(ended);
    if (ended.empty()) ended_->wait();
  }
  std::optional<Error>& error = ended.front().error;
  if (error) return std::unexpected(std::move(*error));
  return {};
}

}  // namespace trunkline
