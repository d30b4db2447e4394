// Log records: what the library chose and why, what was refused, what took long, what was removed. Never in
// the path of every read and write.
//
//   log::info(log::Component::engine, "backend {}: {} lanes of depth {}", name, lanes, depth);
//
// A record that nobody wants costs one relaxed load, and is not formatted. TRUNKLINE_LOG in the environment
// says which are wanted: a level, then the components, if not all of them: "debug,engine,stream".
#pragma once

#include <fmt/core.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace trunkline::log {

enum class Level : std::int8_t { off = -1, error, warn, info, debug };

enum class Component : std::uint8_t {
  engine,
  device,
  volume,
  tensor_file,
  checkpoint,
  stream,
  transformers,
  data,
};
constexpr std::size_t kComponents = static_cast<std::size_t>(Component::data) + 1;

std::string_view to_string(Level level);
std::string_view to_string(Component component);

// The least severe level that is wanted of each component.
using Levels = std::array<Level, kComponents>;

// Reads what TRUNKLINE_LOG may hold. The error says in one line what is wrong with it.
struct ParsedLevels {
  Levels levels{};
  std::string error;  // empty where it could be read
};
ParsedLevels parse(std::string_view text);

// What TRUNKLINE_LOG says, read once; nullopt where it is unset or empty. A value that cannot be read is
// reported on stderr, once, and counts as unset.
const std::optional<Levels>& levels_from_environment();

// Overrides what the environment says.
void set_levels(const Levels& levels);

struct Record {
  Level level;
  Component component;
  std::chrono::system_clock::time_point time;
  std::string thread;  // its name
  std::string message;
};

// Where records go: called by the thread that logs, which may be a lane. It must not wait, throw or log.
using Sink = void (*)(Record record);

// Replaces the sink, and returns the one before. At first it is write_to_stderr.
Sink set_sink(Sink sink);

// One line: time, level, component, thread and message; in one write, so that lines of threads and processes
// do not mix.
void write_to_stderr(Record record);
std::string format_line(const Record& record);

namespace detail {

constexpr std::int8_t kUnread = 127;  // the environment was not looked at yet: everything passes
struct Threshold {
  std::atomic<std::int8_t> level = kUnread;
};
inline std::array<Threshold, kComponents> thresholds;  // by component

bool is_wanted_by_environment(Component component, Level level);
void write(Component component, Level level, fmt::string_view text, fmt::format_args arguments) noexcept;

}  // namespace detail

inline bool is_enabled(Component component, Level level) {
  const std::int8_t threshold =
      detail::thresholds[static_cast<std::size_t>(component)].level.load(std::memory_order_relaxed);
  if (static_cast<std::int8_t>(level) > threshold) return false;
  return threshold != detail::kUnread || detail::is_wanted_by_environment(component, level);
}

template <class... Args>
void write(Component component, Level level, fmt::format_string<Args...> text, Args&&... args) {
  if (is_enabled(component, level)) detail::write(component, level, text, fmt::make_format_args(args...));
}
template <class... Args>
void error(Component component, fmt::format_string<Args...> text, Args&&... args) {
  write(component, Level::error, text, std::forward<Args>(args)...);
}
template <class... Args>
void warn(Component component, fmt::format_string<Args...> text, Args&&... args) {
  write(component, Level::warn, text, std::forward<Args>(args)...);
}
template <class... Args>
void info(Component component, fmt::format_string<Args...> text, Args&&... args) {
  write(component, Level::info, text, std::forward<Args>(args)...);
}
template <class... Args>
void debug(Component component, fmt::format_string<Args...> text, Args&&... args) {
  write(component, Level::debug, text, std::forward<Args>(args)...);
}

// Lets one event a second through, and counts the others: for what may happen a million times. Thread-safe,
// and without a lock, which a fork could leave locked.
class RateLimit {
 public:
  explicit RateLimit(std::chrono::nanoseconds interval = std::chrono::seconds(1)) : interval_(interval) {}

  // How many events were held back since the last that passed; nullopt where this one is held back too.
  std::optional<std::uint64_t> admit(
      std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now());

 private:
  using Ticks = std::chrono::steady_clock::rep;
  static constexpr Ticks kNever = std::numeric_limits<Ticks>::min();

  const std::chrono::steady_clock::duration interval_;
  std::atomic<Ticks> last_ = kNever;
  std::atomic<std::uint64_t> held_back_ = 0;
};

}  // namespace trunkline::log
