// Reports on stderr what a command is currently doing.
#pragma once

#include <chrono>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>

namespace trunkline::cli {

// On a terminal: one line that is redrawn about five times a second. Elsewhere: a plain line every few
// seconds, starting with the third second of a measurement. For use by one thread.
class Progress {
 public:
  using Time = std::chrono::steady_clock::time_point;

  enum class Style { numbers, bar };  // bar: drawn with characters, before the numbers

  Progress(std::ostream& out, bool terminal, Style style = Style::numbers)
      : out_(out), terminal_(terminal), style_(style) {}

  // `duration_s` > 0: the fraction done is that of the time, not of the bytes.
  void begin(std::string label, std::uint64_t total_bytes, double duration_s, Time now);
  void update(std::uint64_t bytes_done, Time now);
  void end();

  // Prints a separate line before the redrawn one.
  void note(std::string_view line);

 private:
  std::string render(std::uint64_t bytes_done, Time now) const;

  std::ostream& out_;
  bool terminal_;
  Style style_;
  bool drawn_ = false;
  std::string label_;
  std::uint64_t total_bytes_ = 0;
  double duration_s_ = 0;
  Time began_;
  Time last_update_;
  Time last_line_;
  std::uint64_t last_bytes_ = 0;
  double rate_now_ = 0;
};

}  // namespace trunkline::cli
