#include "device/cuda/copy_queue.h"

#include <fmt/format.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "device/cuda/context_thread.h"
#include "device/cuda/fence.h"

namespace trunkline::cuda {
namespace {

// The copies that have ended and were not taken yet.
class Results {
 public:
  explicit Results(std::function<void()> on_completion) : on_completion_(std::move(on_completion)) {}

  void add(std::span<const std::uint32_t> tags, const std::optional<Error>& error) {
    {
      const std::scoped_lock lock(mutex_);
      for (const std::uint32_t tag : tags) completions_.push_back({tag, error});
    }
    on_completion_();
  }

  void take(std::vector<CopyQueue::Completion>& completions) {
    const std::scoped_lock lock(mutex_);
    completions.insert(completions.end(), std::make_move_iterator(completions_.begin()),
                       std::make_move_iterator(completions_.end()));
    completions_.clear();
  }

 private:
  const std::function<void()> on_completion_;
  std::mutex mutex_;
  std::vector<CopyQueue::Completion> completions_;
};

// The copies in one direction: a stream, and a thread that waits for them to end. The thread that starts
// copies makes no call of the driver that may block.
class DirectionQueue {
 public:
  DirectionQueue(const CudaDevice& device, Direction direction, Results& results)
      : device_(device), direction_(direction), results_(results) {}
  DirectionQueue(const DirectionQueue&) = delete;
  DirectionQueue& operator=(const DirectionQueue&) = delete;

  ~DirectionQueue() {
    send();
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    waiter_.join();
    if (!device_.usable()) return;
    const ScopedContext context(device_);
    for (const Event event : events_) device_.api().EventDestroy(event);
    if (stream_ != nullptr) device_.api().StreamDestroy(stream_);
  }

  void start(Copy copy) {
    if (auto begun = begin(copy); !begun) {
      results_.add({&copy.tag, 1}, begun.error());
      return;
    }
    group_.tags.push_back(copy.tag);
    if (copy.after) group_.fences.push_back(std::move(copy.after));
  }

  // Records one event for all copies since the last call.
  void send() {
    if (group_.tags.empty()) return;
    Group group = std::exchange(group_, {});
    if (auto recorded = record(group); !recorded) group.failed = recorded.error();
    {
      const std::scoped_lock lock(mutex_);
      groups_.push_back(std::move(group));
    }
    changed_.notify_one();
  }

 private:
  static constexpr unsigned kWaitableEvent = kEventBlockingSync | kEventDisableTiming;

  struct Group {
    Event event = nullptr;
    std::optional<Error> failed;  // then the event was not recorded
    std::vector<std::uint32_t> tags;
    std::vector<Fence> fences;  // kept until the stream has passed them
  };

  Error error(Code code, std::string_view function) const {
    return error_of(device_.api(), code, function, action());
  }
  std::string action() const {
    return fmt::format("copy {} {}", direction_ == Direction::from_host ? "to" : "from", device_.name());
  }

  Status begin(const Copy& copy) {
    const Api& api = device_.api();
    const ScopedContext context(device_);
    if (context.code() != kSuccess) return std::unexpected(error(context.code(), "cuCtxPushCurrent"));
    if (stream_ == nullptr) {
      const Code code = api.StreamCreate(&stream_, kStreamNonBlocking);
      if (code != kSuccess) return std::unexpected(error(code, "cuStreamCreate"));
    }
    auto started = waiter_.start(device_, "trunkline-copy", action(), [this] { wait_for_groups(); });
    if (!started) return started;
    if (copy.after) {
      const Code code = api.StreamWaitEvent(stream_, event_of(copy.after), 0);
      if (code != kSuccess) return std::unexpected(error(code, "cuStreamWaitEvent"));
    }
    const auto device = reinterpret_cast<DevicePointer>(copy.device);
    if (direction_ == Direction::from_host) {
      const Code code = api.MemcpyHtoDAsync(device, copy.host, copy.bytes, stream_);
      if (code != kSuccess) return std::unexpected(error(code, "cuMemcpyHtoDAsync"));
    } else {
      const Code code = api.MemcpyDtoHAsync(copy.host, device, copy.bytes, stream_);
      if (code != kSuccess) return std::unexpected(error(code, "cuMemcpyDtoHAsync"));
    }
    return {};
  }

  Status record(Group& group) {
    const ScopedContext context(device_);
    if (context.code() != kSuccess) return std::unexpected(error(context.code(), "cuCtxPushCurrent"));
    group.event = free_event();
    if (group.event == nullptr) {
      const Code code = device_.api().EventCreate(&group.event, kWaitableEvent);
      if (code != kSuccess) return std::unexpected(error(code, "cuEventCreate"));
    }
    const Code code = device_.api().EventRecord(group.event, stream_);
    if (code != kSuccess) return std::unexpected(error(code, "cuEventRecord"));
    return {};
  }

  Event free_event() {
    const std::scoped_lock lock(mutex_);
    if (events_.empty()) return nullptr;
    const Event event = events_.back();
    events_.pop_back();
    return event;
  }

  void wait_for_groups() {
    while (true) {
      Group group;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !groups_.empty() || stopping_; });
        if (groups_.empty()) return;
        group = std::move(groups_.front());
        groups_.pop_front();
      }
      if (!group.failed) {
        const Code code = device_.api().EventSynchronize(group.event);
        if (code != kSuccess) group.failed = error(code, "cuEventSynchronize");
      }
      // The copies may be in flight in spite of the error. Where the stream cannot be synchronized either,
      // the context is lost, and all of its work with it.
      if (group.failed) device_.api().StreamSynchronize(stream_);
      group.fences.clear();
      if (group.event != nullptr) {
        const std::scoped_lock lock(mutex_);
        events_.push_back(group.event);
      }
      results_.add(group.tags, group.failed);
    }
  }

  const CudaDevice& device_;
  const Direction direction_;
  Results& results_;
  Stream stream_ = nullptr;  // used only by the thread that starts copies, as group_
  Group group_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Group> groups_;
  std::vector<Event> events_;  // unused ones
  bool stopping_ = false;
  ContextThread waiter_;
};

class CudaCopyQueue final : public CopyQueue {
 public:
  CudaCopyQueue(const CudaDevice& device, std::function<void()> on_completion)
      : results_(std::move(on_completion)),
        from_host_(device, Direction::from_host, results_),
        to_host_(device, Direction::to_host, results_) {}

  void start(Copy copy) override {
    (copy.direction == Direction::from_host ? from_host_ : to_host_).start(std::move(copy));
  }
  void send() override {
    from_host_.send();
    to_host_.send();
  }
  void take(std::vector<Completion>& completions) override { results_.take(completions); }

 private:
  Results results_;
  DirectionQueue from_host_;
  DirectionQueue to_host_;
};

}  // namespace

Result<std::unique_ptr<CopyQueue>> open_copy_queue(const CudaDevice& device,
                                                   std::function<void()> on_completion) {
  if (auto status = device.usable(); !status) return std::unexpected(status.error());
  return std::make_unique<CudaCopyQueue>(device, std::move(on_completion));
}

}  // namespace trunkline::cuda
