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
#include "device/gds/memory.h"

namespace trunkline::cufile {
namespace {

using cuda::Code;
using cuda::Current;

// Stream-ordered calls: each comes after its fence without anybody waiting for it. Those of one stream follow
// one another, so there are several; a thread waits for their ends.
class CufileQueue final : public GdsQueue {
 public:
  CufileQueue(const cuda::CudaDevice& device, std::function<void()> on_ended)
      : device_(device), on_ended_(std::move(on_ended)) {}
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
    const Current current(device_);
    for (const cuda::Event event : events_) device_.api().EventDestroy(event);
    for (const Lane& lane : lanes_) {
      if (lane.stream == nullptr) continue;
      if (lane.registered) api_->StreamDeregister(lane.stream);
      device_.api().StreamDestroy(lane.stream);
    }
  }

  void start(GdsTransfer copy) override {
    auto job = std::make_unique<Job>();
    job->tag = copy.tag;
    job->bytes = copy.bytes;
    job->file_offset = static_cast<off_t>(copy.offset);
    Registered memory = find_registered({copy.device, copy.bytes});
    if (memory.in_part) {  // which cuFile does not take
      end(*job, 0);
      return;
    }
    job->memory_offset = copy.device - memory.base;
    job->memory = std::move(memory.hold);
    auto begun = begin(copy, memory.base, *job);
    if (!begun) {
      end(*job, std::unexpected(begun.error()));
      return;
    }
    {
      const std::scoped_lock lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }

  void send() override {}  // nothing is held back

  void take(std::vector<Ended>& ended) override {
    const std::scoped_lock lock(mutex_);
    ended.insert(ended.end(), std::make_move_iterator(ended_.begin()), std::make_move_iterator(ended_.end()));
    ended_.clear();
  }

 private:
  static constexpr std::size_t kStreams = 8;
  static constexpr unsigned kWaitedFor = cuda::kEventBlockingSync | cuda::kEventDisableTiming;

  struct Lane {
    cuda::Stream stream = nullptr;
    bool registered = false;
  };

  // What cuFile is given pointers into: stays where it is until the stream has passed it.
  struct Job {
    std::uint32_t tag = 0;
    std::size_t bytes = 0;
    off_t file_offset = 0;
    off_t memory_offset = 0;
    ssize_t moved = 0;
    bool to_file = false;
    cuda::Stream stream = nullptr;
    cuda::Event event = nullptr;
    std::optional<Error> failed;  // the event was not recorded, and tells nothing
    bool refused = false;         // by cuFile
    Fence after;
    std::shared_ptr<const void> memory;  // its registration
    std::shared_ptr<const GdsFile> file;
  };

  std::string action(bool to_file) const {
    return fmt::format("{} {} by GPUDirect Storage", to_file ? "writing from" : "reading to", device_.name());
  }
  Error error(Code code, std::string_view function, bool to_file) const {
    return error_of(device_.api(), code, function, action(to_file));
  }

  // Fails where nothing was begun.
  Status begin(const GdsTransfer& copy, std::byte* base, Job& job) {
    const auto failed = [&](Code code, std::string_view function) {
      return std::unexpected(error(code, function, copy.to_file));
    };
    const cuda::Api& api = device_.api();
    const Current current(device_);
    if (current.code() != cuda::kSuccess) return failed(current.code(), "cuCtxPushCurrent");
    auto started = waiter_.start(device_, "trunkline-gds", action(copy.to_file), [this] { wait_for_jobs(); });
    if (!started) return started;
    job.file = copy.file;
    api_ = &api_of(*copy.file);
    Lane& lane = lanes_[next_lane_++ % kStreams];
    if (lane.stream == nullptr) {
      if (const Code code = api.StreamCreate(&lane.stream, cuda::kStreamNonBlocking); code != cuda::kSuccess)
        return failed(code, "cuStreamCreate");
      // Without it they run all the same, slower.
      lane.registered = api_->StreamRegister(lane.stream, kAllKnownAndAligned).code == kSuccess;
    }
    job.to_file = copy.to_file;
    job.stream = lane.stream;
    job.after = copy.after;
    if (auto code = event_for(job); code != cuda::kSuccess) return failed(code, "cuEventCreate");
    if (copy.after) {
      const Code code = api.StreamWaitEvent(lane.stream, cuda::event_of(copy.after), 0);
      if (code != cuda::kSuccess) return failed(code, "cuStreamWaitEvent");
    }
    const auto call = copy.to_file ? api_->WriteAsync : api_->ReadAsync;
    const Outcome outcome = call(handle_of(*copy.file), base, &job.bytes, &job.file_offset,
                                 &job.memory_offset, &job.moved, lane.stream);
    if (outcome.code != kSuccess) {
      // Something may have been begun all the same.
      job.failed =
          error_of(outcome, copy.to_file ? "cuFileWriteAsync" : "cuFileReadAsync", action(copy.to_file));
      job.refused = true;
      return {};
    }
    const Code code = api.EventRecord(job.event, lane.stream);
    if (code != cuda::kSuccess) job.failed = error(code, "cuEventRecord", copy.to_file);
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
    return device_.api().EventCreate(&job.event, kWaitedFor);
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
      // It may be under way all the same. Where the stream cannot be waited for either, the context is lost,
      // and with it all its work.
      const bool lost = failed && device_.api().StreamSynchronize(job->stream) != cuda::kSuccess;
      if (!lost) {
        job->after.reset();
        job->memory.reset();
        job->file.reset();
      }
      if (failed)
        end(*job, std::unexpected(*failed));
      else if (job->moved < 0)
        end_refused(*job);
      else
        end(*job, static_cast<std::uint64_t>(job->moved));
      if (lost) keep_for_good(std::move(job));
    }
  }

  // Of a lost context nobody says when cuFile's own threads let go of what they were given.
  static void keep_for_good(std::unique_ptr<Job> job) {
    static std::mutex mutex;
    static auto* kept = new std::vector<std::unique_ptr<Job>>;  // NOLINT(cppcoreguidelines-owning-memory)
    const std::scoped_lock lock(mutex);
    kept->push_back(std::move(job));
  }

  void end_refused(Job& job) {
    Error error = error_of_result(job.moved, action(job.to_file));
    // Not where the kernel says why, as of a full disk: it will say so again.
    job.refused = error.kind == ErrorKind::device;
    end(job, std::unexpected(std::move(error)));
  }

  void end(Job& job, Result<std::uint64_t> bytes) {
    {
      const std::scoped_lock lock(mutex_);
      if (job.event != nullptr) events_.push_back(job.event);
      ended_.push_back({.tag = job.tag, .bytes = std::move(bytes), .again = job.refused});
    }
    on_ended_();
  }

  const cuda::CudaDevice& device_;
  const std::function<void()> on_ended_;
  const Api* api_ = nullptr;  // once something was started
  std::array<Lane, kStreams> lanes_;
  std::size_t next_lane_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Job>> jobs_;
  std::vector<Ended> ended_;
  std::vector<cuda::Event> events_;  // to be used again
  bool stopping_ = false;
  cuda::ContextThread waiter_;
};

}  // namespace

Result<std::unique_ptr<GdsQueue>> open_queue(const cuda::CudaDevice& device, std::function<void()> on_ended) {
  return std::make_unique<CufileQueue>(device, std::move(on_ended));
}

}  // namespace trunkline::cufile
