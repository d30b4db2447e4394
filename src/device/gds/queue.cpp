#include "device/gds/queue.h"

#include <fmt/format.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "device/cuda/context_thread.h"
#include "device/cuda/fence.h"
#include "device/gds/file.h"
#include "device/gds/session.h"

namespace trunkline::cufile {
namespace {

using cuda::Code;
using cuda::ScopedContext;

// Makes stream-ordered calls: each runs after its fence without a thread waiting for the fence. Calls of one
// stream run one after another, so there are several streams. A thread waits for the calls to finish.
class CufileQueue final : public GdsQueue {
 public:
  CufileQueue(const cuda::CudaDevice& device, std::function<void()> on_completion)
      : device_(device), on_completion_(std::move(on_completion)) {}
  CufileQueue(const CufileQueue&) = delete;
  CufileQueue& operator=(const CufileQueue&) = delete;

  ~CufileQueue() override {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    waiter_.join();
    if (!device_.usable()) return;
    const ScopedContext context(device_);
    for (const cuda::Event event : events_) device_.api().EventDestroy(event);
    for (const QueueStream& queue_stream : streams_) {
      if (queue_stream.handle == nullptr) continue;
      if (queue_stream.registered) api_->StreamDeregister(queue_stream.handle);
      device_.api().StreamDestroy(queue_stream.handle);
    }
  }

  void start(GdsTransfer transfer) override {
    auto job = std::make_unique<Job>();
    job->tag = transfer.tag;
    job->bytes = transfer.bytes;
    job->file_offset = static_cast<off_t>(transfer.offset);
    auto memory = device_.gds().memory().find({transfer.device, transfer.bytes});
    if (memory.is_split) {  // cuFile does not accept it
      finish(*job, 0);
      return;
    }
    job->memory_offset = transfer.device - memory.base;
    job->registration = std::move(memory.registration);
    auto begun = begin(transfer, memory.base, *job);
    if (!begun) {
      finish(*job, std::unexpected(begun.error()));
      return;
    }
    {
      const std::scoped_lock lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }

  void send() override {}  // start() holds nothing back

  void take(std::vector<Completion>& completions) override {
    const std::scoped_lock lock(mutex_);
    completions.insert(completions.end(), std::make_move_iterator(completions_.begin()),
                       std::make_move_iterator(completions_.end()));
    completions_.clear();
  }

 private:
  static constexpr std::size_t kStreams = 8;
  static constexpr unsigned kWaitableEvent = cuda::kEventBlockingSync | cuda::kEventDisableTiming;

  struct QueueStream {
    cuda::Stream handle = nullptr;
    bool registered = false;
  };

  // cuFile is given pointers into it: it is neither moved nor destroyed until the stream has passed it.
  struct Job {
    std::uint32_t tag = 0;
    std::size_t bytes = 0;
    off_t file_offset = 0;
    off_t memory_offset = 0;
    ssize_t moved = 0;
    bool to_file = false;
    cuda::Stream stream = nullptr;
    cuda::Event event = nullptr;
    std::optional<Error> failed;  // then the event was not recorded
    bool permanent = false;       // the failure: see Completion
    Fence after;
    Registration registration;  // of the memory
    std::shared_ptr<const GdsFile> file;
  };

  std::string action(bool to_file) const {
    return fmt::format("{} {} by GPUDirect Storage", to_file ? "write from" : "read to", device_.name());
  }
  Error error(Code code, std::string_view function, bool to_file) const {
    return error_of(device_.api(), code, function, action(to_file));
  }

  // Fails where nothing was begun.
  Status begin(const GdsTransfer& transfer, std::byte* base, Job& job) {
    const auto failed = [&](Code code, std::string_view function) {
      return std::unexpected(error(code, function, transfer.to_file));
    };
    const cuda::Api& api = device_.api();
    const ScopedContext context(device_);
    if (context.code() != cuda::kSuccess) return failed(context.code(), "cuCtxPushCurrent");
    auto started =
        waiter_.start(device_, "trunkline-gds", action(transfer.to_file), [this] { wait_for_jobs(); });
    if (!started) return started;
    job.file = transfer.file;
    const CufileFile& file = cufile_file(*transfer.file);
    api_ = &file.api();
    QueueStream& queue_stream = streams_[next_stream_++ % kStreams];
    if (queue_stream.handle == nullptr) {
      if (const Code code = api.StreamCreate(&queue_stream.handle, cuda::kStreamNonBlocking);
          code != cuda::kSuccess)
        return failed(code, "cuStreamCreate");
      // A stream that is not registered works, too, more slowly.
      queue_stream.registered =
          api_->StreamRegister(queue_stream.handle, kAllKnownAndAligned).code == kSuccess;
    }
    job.to_file = transfer.to_file;
    job.stream = queue_stream.handle;
    job.after = transfer.after;
    if (auto code = event_for(job); code != cuda::kSuccess) return failed(code, "cuEventCreate");
    if (transfer.after) {
      const Code code = api.StreamWaitEvent(queue_stream.handle, cuda::event_of(transfer.after), 0);
      if (code != cuda::kSuccess) return failed(code, "cuStreamWaitEvent");
    }
    const auto call = transfer.to_file ? api_->WriteAsync : api_->ReadAsync;
    const Outcome outcome = call(file.handle(), base, &job.bytes, &job.file_offset, &job.memory_offset,
                                 &job.moved, queue_stream.handle);
    if (outcome.code != kSuccess) {
      // cuFile may have begun a part of it all the same.
      job.failed = error_of(outcome, transfer.to_file ? "cuFileWriteAsync" : "cuFileReadAsync",
                            action(transfer.to_file));
      job.permanent = true;
      return {};
    }
    const Code code = api.EventRecord(job.event, queue_stream.handle);
    if (code != cuda::kSuccess) job.failed = error(code, "cuEventRecord", transfer.to_file);
    return {};
  }

  Code event_for(Job& job) {
    {
      const std::scoped_lock lock(mutex_);
      if (!events_.empty()) {
        job.event = events_.back();
        events_.pop_back();
        return cuda::kSuccess;
      }
    }
    return device_.api().EventCreate(&job.event, kWaitableEvent);
  }

  void wait_for_jobs() {
    while (true) {
      std::unique_ptr<Job> job;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !jobs_.empty() || stopping_; });
        if (jobs_.empty()) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      std::optional<Error> failed = job->failed;
      if (!failed) {
        const Code code = device_.api().EventSynchronize(job->event);
        if (code != cuda::kSuccess) failed = error(code, "cuEventSynchronize", job->to_file);
      }
      // The transfer may be under way in spite of the error. Where the stream cannot be synchronized either,
      // the context is lost, and all of its work with it.
      const bool lost = failed && device_.api().StreamSynchronize(job->stream) != cuda::kSuccess;
      if (!lost) {
        job->after.reset();
        job->registration.reset();
        job->file.reset();
      }
      if (failed)
        finish(*job, std::unexpected(*failed));
      else if (job->moved < 0)
        finish_failed(*job);
      else
        finish(*job, static_cast<std::uint64_t>(job->moved));
      if (lost) device_.gds().keep_forever(std::move(job));
    }
  }

  void finish_failed(Job& job) {
    Error error = error_of_result(job.moved, action(job.to_file));
    // Not where the kernel says why, as of a full disk: other I/O paths would fail alike.
    job.permanent = error.kind == ErrorKind::device;
    finish(job, std::unexpected(std::move(error)));
  }

  void finish(Job& job, Result<std::uint64_t> bytes) {
    {
      const std::scoped_lock lock(mutex_);
      if (job.event != nullptr) events_.push_back(job.event);
      completions_.push_back({.tag = job.tag, .bytes = std::move(bytes), .permanent = job.permanent});
    }
    on_completion_();
  }

  const cuda::CudaDevice& device_;
  const std::function<void()> on_completion_;
  const Api* api_ = nullptr;  // null until the first transfer
  std::array<QueueStream, kStreams> streams_;
  std::size_t next_stream_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Job>> jobs_;
  std::vector<Completion> completions_;
  std::vector<cuda::Event> events_;  // unused ones
  bool stopping_ = false;
  cuda::ContextThread waiter_;
};

}  // namespace

Result<std::unique_ptr<GdsQueue>> open_queue(const cuda::CudaDevice& device,
                                             std::function<void()> on_completion) {
  return std::make_unique<CufileQueue>(device, std::move(on_completion));
}

}  // namespace trunkline::cufile
