#include "device/blocking_copies.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace trunkline {

class BlockingCopies::Bell {
 public:
  void ring() {
    const std::scoped_lock lock(mutex_);
    rung_ = true;
    changed_.notify_one();
  }
  void await() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return std::exchange(rung_, false); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool rung_ = false;
};

BlockingCopies::BlockingCopies() : bell_(std::make_unique<Bell>()) {}
BlockingCopies::BlockingCopies(BlockingCopies&&) noexcept = default;
BlockingCopies& BlockingCopies::operator=(BlockingCopies&& other) noexcept {
  queue_ = std::move(other.queue_);
  bell_ = std::move(other.bell_);
  return *this;
}
BlockingCopies::~BlockingCopies() = default;

Result<BlockingCopies> BlockingCopies::open(Device& device) {
  BlockingCopies copies;
  auto queue = device.open_queue([bell = copies.bell_.get()] { bell->ring(); });
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
    if (ended.empty()) bell_->await();
  }
  std::optional<Error>& error = ended.front().error;
  if (error) return std::unexpected(std::move(*error));
  return {};
}

}  // namespace trunkline
