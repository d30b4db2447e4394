#include "stream/unit_loader.h"

#include <algorithm>
#include <utility>

#include "base/trace.h"
#include "base/waits.h"
#include "io/engine_core.h"
#include "stream/stream_trace.h"

namespace trunkline {

UnitLoader::UnitLoader(UnitSource& source, std::mutex& mutex, std::condition_variable& changed,
                       std::function<void(UnitFrame&)> read_ended)
    : source_(source),
      mutex_(mutex),
      changed_(changed),
      read_ended_(std::move(read_ended)),
      verified_version_(source.units().size()) {}

UnitLoader::~UnitLoader() {
  // In a forked child, what the parent's threads were doing never ends.
  if (source_.engine().core()->belongs_to_parent()) return;
  Lock lock(mutex_);
  cancel(lock, reading_);
  changed_.wait(lock, [&] { return under_way_ == 0; });
}

UnitLoadStats UnitLoader::stats() const {
  UnitLoadStats stats = counts_;
  if (!reading_.empty()) stats.read_ns += ns_since(reading_since_);
  return stats;
}

void UnitLoader::assign(UnitFrame& frame, std::size_t unit) {
  frame.unit = unit;
  frame.state = State::reading;
  frame.evicting = false;
  frame.is_checked = false;
  frame.pending = source_.units()[unit].parts.size() + 1;  // one for the submission
  frame.error.reset();
  frame.futures.clear();
  frame.trace_start_ns = trace::start();
  frame.trace_caller = trace::this_thread();
  if (reading_.empty()) reading_since_ = Clock::now();
  reading_.push_back(&frame);
  ++under_way_;
}

void UnitLoader::read(Lock& lock, std::span<UnitFrame* const> frames) {
  lock.unlock();
  // The unit and the memory of a frame that is `reading` do not change.
  std::vector<Result<std::uint64_t>> versions;
  std::vector<Request> requests;
  for (const UnitFrame* frame : frames) {
    versions.push_back(source_.version_of(frame->unit));
    if (versions.back()) source_.add_reads(frame->unit, frame->data, requests);
  }
  std::vector<Future> futures;
  if (!requests.empty()) futures = source_.engine().submit(requests);

  lock.lock();
  auto next = futures.begin();
  for (std::size_t index = 0; index < frames.size(); ++index) {
    UnitFrame& frame = *frames[index];
    if (versions[index]) {
      const auto first = next;
      next += static_cast<std::ptrdiff_t>(frame.pending - 1);
      frame.futures.assign(first, next);
      frame.file_version = *versions[index];
    } else {
      frame.error = versions[index].error();
      frame.pending = 1;
    }
  }
  lock.unlock();
  next = futures.begin();
  for (std::size_t index = 0; index < frames.size(); ++index) {
    if (!versions[index]) continue;
    UnitFrame& frame = *frames[index];
    for (std::size_t part = source_.units()[frame.unit].parts.size(); part > 0; --part) {
      Future& future = *next++;
      future.on_done([this, &frame, future] {
        const std::scoped_lock guard(mutex_);
        arrived(frame, future.result());
      });
    }
  }
  lock.lock();
  for (UnitFrame* frame : frames) arrived(*frame, 0);
}

// Called for each part, and once for the submission.
void UnitLoader::arrived(UnitFrame& frame, const Result<std::uint64_t>& result) {
  if (!result && !frame.error) frame.error = result.error();
  if (--frame.pending > 0) return;
  frame.futures.clear();
  const StreamUnit& unit = source_.units()[frame.unit];
  if (frame.trace_start_ns != 0) {
    trace::record({.kind = &kReadUnit,
                   .start_ns = frame.trace_start_ns,
                   .end_ns = trace::now(),
                   .caller = frame.trace_caller,
                   .text = trace::intern(unit.name),
                   .bytes = unit.bytes});
  }
  frame.state = frame.error ? State::failed : State::ready;
  if (!frame.evicting && frame.error) ++counts_.failed;
  if (!frame.evicting && !frame.error) {
    ++counts_.units_read;
    counts_.bytes_read += stored_bytes(unit);
  }
  read_ended_(frame);
  std::erase(reading_, &frame);
  if (reading_.empty()) counts_.read_ns += ns_since(reading_since_);
  --under_way_;
  changed_.notify_all();  // under the lock: a waiter may destroy this next
}

void UnitLoader::cancel(Lock& lock, std::span<UnitFrame* const> frames) {
  std::vector<Future> futures;
  for (const UnitFrame* frame : frames) {
    if (frame->state == State::reading)
      futures.insert(futures.end(), frame->futures.begin(), frame->futures.end());
  }
  if (futures.empty()) return;
  ++under_way_;
  lock.unlock();
  for (Future& future : futures) future.cancel();
  lock.lock();
  --under_way_;
  changed_.notify_all();
}

Status UnitLoader::verify(Lock& lock, UnitFrame& frame) {
  lock.unlock();
  const auto started = Clock::now();
  Status good = check(frame);
  const std::uint64_t spent = ns_since(started);
  lock.lock();
  counts_.verify_ns += spent;
  if (good) {
    frame.is_checked = true;
    verified_version_[frame.unit] = frame.file_version;
  } else {
    ++counts_.failed;
  }
  changed_.notify_all();
  return good;
}

// Without the lock: nothing else changes the frame, or what is known of its unit, while it is `checking`.
Status UnitLoader::check(const UnitFrame& frame) {
  if (source_.verify() == StreamVerify::never) return {};
  const bool is_once = source_.verify() == StreamVerify::once;
  if (is_once && frame.is_checked) return {};
  const auto file_version = source_.version_of(frame.unit);
  if (!file_version) return std::unexpected(file_version.error());
  if (is_once && verified_version_[frame.unit] == *file_version) return {};
  const StreamUnit& unit = source_.units()[frame.unit];
  const trace::Span span(kCheckUnit, unit.name, unit.bytes);
  return source_.check_sums(frame.unit, frame.data, *file_version);
}

}  // namespace trunkline
