// Loads units into frames: reads them from their files, and verifies what has arrived.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "stream/unit_frame.h"
#include "stream/unit_load_stats.h"
#include "stream/unit_source.h"

namespace trunkline {

// The protocol of a frame:
// 1. assign(): it has the unit, and is `reading`.
// 2. read() submits the reads of the unit's parts. The submission counts as one more part: until it has ended
//    too, the frame stays `reading` and belongs to this read.
// 3. The last part has arrived: the frame is `ready` or `failed`, and its owner hears of that.
// 4. The thread that acquires the unit first makes the frame `checking`, calls verify(), and makes it `held`
//    or empty.
//
// The owner's mutex guards the frames and everything here; it is held when a member function is called.
// Nothing that may run a completion (submitting, cancelling) happens under it, nor do checksums: functions
// that are given the lock release it meanwhile.
class UnitLoader {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // `changed` is notified when a read or a verification has ended. `read_ended` is called just before, under
  // the lock, with a frame that has become `ready` or `failed`; it may empty the frame.
  UnitLoader(UnitSource& source, std::mutex& mutex, std::condition_variable& changed,
             std::function<void(UnitFrame&)> read_ended);
  UnitLoader(const UnitLoader&) = delete;
  UnitLoader& operator=(const UnitLoader&) = delete;
  // Without the lock: cancels reads in flight, and waits for them. Frames must not be destroyed earlier.
  ~UnitLoader();

  void assign(UnitFrame& frame, std::size_t unit);
  // Submits the reads of frames that have been assigned their units, all at once.
  void read(Lock& lock, std::span<UnitFrame* const> frames);
  // Cancels the reads of those frames that are `reading`; each still ends as if it had not been cancelled.
  void cancel(Lock& lock, std::span<UnitFrame* const> frames);

  // Verifies the unit of a frame that is `checking`, as far as UnitSource::verify() requires.
  Status verify(Lock& lock, UnitFrame& frame);
  // Whether the unit has been verified, though perhaps not since it was read last.
  bool was_verified(std::size_t unit) const { return verified_version_[unit].has_value(); }

  // What is acquired, and waited for (UnitWait), is the owner's to count.
  UnitLoadStats& counts() { return counts_; }
  UnitLoadStats stats() const;

 private:
  using Clock = std::chrono::steady_clock;
  using State = UnitFrame::State;

  void arrived(UnitFrame& frame, const Result<std::uint64_t>& result);
  Status check(const UnitFrame& frame);

  UnitSource& source_;
  std::mutex& mutex_;
  std::condition_variable& changed_;
  const std::function<void(UnitFrame&)> read_ended_;

  std::vector<UnitFrame*> reading_;
  Clock::time_point reading_since_;  // while there are any
  std::size_t under_way_ = 0;        // reads in flight, and threads that cancel some
  std::vector<std::optional<std::uint64_t>>
      verified_version_;  // for each unit: the file version at which its bytes were verified
  UnitLoadStats counts_;
};

}  // namespace trunkline
