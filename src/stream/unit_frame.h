// Memory for one unit, and how far its loading has come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/trace.h"
#include "trunkline/engine.h"

namespace trunkline {

// UnitLoader has the protocol of the fields that it sets.
struct UnitFrame {
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  enum class State {
    empty,
    reading,
    ready,
    failed,    // `error` has the reason, for threads that acquire the unit
    checking,  // by the thread that acquires it
    held,
  };

  // Whether the unit can be handed out, or the error of its read.
  bool has_arrived() const { return state == State::ready || state == State::held || state == State::failed; }
  void clear();

  std::byte* data = nullptr;
  std::size_t unit = kNone;
  State state = State::empty;
  bool evicting = false;    // becomes empty as soon as its read has ended
  bool is_checked = false;  // the unit was verified since it was read
  std::size_t holders = 0;
  std::size_t waiters = 0;
  std::size_t pending = 0;         // parts in flight
  std::uint64_t file_version = 0;  // of the files, before they were read: UnitSource
  std::vector<Future> futures;     // of the read
  std::optional<Error> error;
  std::uint64_t trace_start_ns = 0;  // of the reading; 0 while no trace is recorded
  trace::ThreadNumber trace_caller = 0;
};

inline void UnitFrame::clear() {
  unit = kNone;
  state = State::empty;
  evicting = false;
  error.reset();
}

}  // namespace trunkline
