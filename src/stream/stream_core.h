// The ring of slots behind a WeightStream, and what is read into it.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "stream/file_stamps.h"
#include "trunkline/stream.h"

namespace trunkline {

// A unit's way: its place is chosen (its own when it is resident, else an empty slot) and its parts are sent
// to be read -> the last one has arrived, and it is ready -> it is acquired, which checks it first -> its
// last holder releases it, and its slot is empty again.
//
// One mutex guards all of it. Nothing that may run a completion (submitting, cancelling) happens under it.
class StreamCore {
 public:
  StreamCore(const Engine& engine, std::vector<File> files, std::vector<StreamUnit> units,
             StreamPlacement placement, StreamVerify verify);
  StreamCore(const StreamCore&) = delete;
  StreamCore& operator=(const StreamCore&) = delete;
  ~StreamCore();

  Status start();  // allocates, and begins to read

  Result<MemoryView> acquire(std::size_t unit, std::optional<std::chrono::nanoseconds> timeout);
  Status release(std::size_t unit);
  Status set_order(std::vector<std::size_t> order);

  std::span<const MemoryView> memory() const { return memory_; }
  const std::vector<StreamUnit>& units() const { return units_; }
  const StreamPlacement& placement() const { return placement_; }
  StreamStats stats() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Deadline = std::optional<std::chrono::steady_clock::time_point>;
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  enum class State {
    empty,
    reading,
    ready,
    failed,    // `error` says why, to whoever acquires the unit
    checking,  // by the one who acquires it
    held,
  };
  struct Place {
    std::byte* data = nullptr;
    std::size_t unit = kNone;
    State state = State::empty;
    bool given_up = false;  // empty as soon as the reading has ended
    std::size_t holders = 0;
    std::size_t waiters = 0;
    std::size_t pending = 0;      // parts under way
    std::uint64_t reading = 0;    // number of the reading; tells it from later ones in this place
    std::uint64_t looked = 0;     // at the files, before they were read: FileStamps
    std::vector<Future> futures;  // of the reading
    std::optional<Error> error;
  };

  Status check_unit(std::size_t unit) const;
  bool is_slot(const Place& place) const { return place_index(place) < placement_.slots; }
  std::size_t place_index(const Place& place) const {
    return static_cast<std::size_t>(&place - places_.data());
  }
  Place* place_of(std::size_t unit);
  Place* room_for(std::size_t unit);
  std::size_t distance(std::size_t from, std::size_t to) const;

  void read_ahead(Lock& lock);
  void read(Lock& lock, Place& place, std::size_t unit);
  void arrived(Place& place, const Result<std::uint64_t>& result);
  Status turn_to(Lock& lock, std::size_t unit);
  void give_up_those_behind(Lock& lock, std::size_t unit);
  void make_room(Lock& lock, std::size_t unit);
  static bool may_give_up(const Place& place);
  void give_up(Lock& lock, const std::vector<Place*>& places);
  void give_up_unchecked(Lock& lock);
  void empty(Place& place);
  bool wait(Lock& lock, const Deadline& deadline);
  Result<MemoryView> take(Lock& lock, Place& place);
  Status check(const Place& place);
  Status check_sums(const StreamUnit& unit, const std::byte* data, std::uint64_t looked) const;
  Result<std::uint64_t> look(const StreamUnit& unit);

  const Engine engine_;
  const std::vector<File> files_;
  const std::vector<StreamUnit> units_;
  const StreamPlacement placement_;
  const StreamVerify verify_;
  Buffer slots_;
  Buffer resident_;
  std::array<MemoryView, 2> memory_;
  FileStamps stamps_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Place> places_;          // the slots, then one for each resident unit
  std::vector<std::size_t> home_;      // of a resident unit: index of its place
  std::vector<std::size_t> at_;        // of a unit that is in memory or on its way: index of its place
  std::vector<std::size_t> order_;     // of units
  std::vector<std::size_t> position_;  // of a unit in the order
  std::vector<std::size_t> rank_;      // of a unit among those that pass through slots, in the order
  std::size_t passing_ = 0;            // units that pass through slots
  std::size_t next_ = 0;               // position of what is read next
  std::size_t under_way_ = 0;          // readings, and threads that submit or cancel some
  std::size_t reading_ = 0;            // readings
  std::chrono::steady_clock::time_point reading_since_;  // while there are any
  std::uint64_t readings_ = 0;
  std::vector<std::optional<std::uint64_t>> checked_;  // of a unit: the look at which its bytes were good
  StreamStats stats_;
};

}  // namespace trunkline
