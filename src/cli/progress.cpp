#include "cli/progress.h"

#include <fmt/format.h>

#include <algorithm>

#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

constexpr std::chrono::milliseconds kRedraw{200};
constexpr std::chrono::seconds kPlainStart{2};
constexpr std::chrono::seconds kPlainEvery{5};

double seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

std::string bar(double share) {
  constexpr std::size_t kWidth = 24;
  return fmt::format("[{:.<{}}]", std::string(static_cast<std::size_t>(share * kWidth), '#'), kWidth);
}

}  // namespace

void Progress::begin(std::string label, std::uint64_t total_bytes, double duration_s, Time now) {
  label_ = std::move(label);
  total_bytes_ = total_bytes;
  duration_s_ = duration_s;
  began_ = last_update_ = now;
  last_line_ = now + kPlainStart - kPlainEvery;
  last_bytes_ = 0;
  rate_now_ = 0;
}

std::string Progress::render(std::uint64_t bytes_done, Time now) const {
  const double elapsed = seconds(now - began_);
  const double average = elapsed > 0 ? static_cast<double>(bytes_done) / elapsed : 0;
  double share = 0;
  double left_s = 0;
  if (duration_s_ > 0) {
    share = elapsed / duration_s_;
    left_s = duration_s_ - elapsed;
  } else if (total_bytes_ > 0) {
    share = static_cast<double>(bytes_done) / static_cast<double>(total_bytes_);
    left_s =
        average > 0 ? static_cast<double>(total_bytes_ - std::min(bytes_done, total_bytes_)) / average : 0;
  }
  share = std::clamp(share, 0.0, 1.0);
  return fmt::format("{}: {}{} now, {} average, {:.0f}%, {:.0f} s left", label_,
                     style_ == Style::bar ? bar(share) + " " : "", format_rate(rate_now_),
                     format_rate(average), 100 * share, std::max(left_s, 0.0));
}

void Progress::update(std::uint64_t bytes_done, Time now) {
  if (now - last_update_ < kRedraw) return;
  rate_now_ = bytes_done > last_bytes_
                  ? static_cast<double>(bytes_done - last_bytes_) / seconds(now - last_update_)
                  : 0;
  last_bytes_ = bytes_done;
  last_update_ = now;
  if (terminal_) {
    out_ << "\r\033[K" << render(bytes_done, now) << std::flush;
    drawn_ = true;
  } else if (now - last_line_ >= kPlainEvery) {
    last_line_ = now;
    out_ << render(bytes_done, now) << '\n' << std::flush;
  }
}

void Progress::end() {
  if (drawn_) out_ << "\r\033[K" << std::flush;
  drawn_ = false;
}

void Progress::note(std::string_view line) {
  end();
  out_ << line << '\n' << std::flush;
}

}  // namespace trunkline::cli
