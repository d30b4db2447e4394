#include "base/log.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace trunkline::log {
namespace {

constexpr std::array<std::string_view, 4> kLevelNames = {"error", "warn", "info", "debug"};
constexpr std::array<std::string_view, kComponents> kComponentNames = {
    "engine", "device", "volume", "tensor_file", "checkpoint", "stream", "transformers", "data"};
static_assert(!kComponentNames.back().empty(), "a component has no name");
constexpr const char* kVariable = "TRUNKLINE_LOG";

std::atomic<Sink> current_sink{&write_to_stderr};

Levels all_at(Level level) {
  Levels levels;
  levels.fill(level);
  return levels;
}

std::string joined(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// The index of `name`; the size of `names` where it is not among them.
std::size_t index_of(std::span<const std::string_view> names, std::string_view name) {
  std::size_t index = 0;
  while (index < names.size() && names[index] != name) ++index;
  return index;
}

void write_all(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written <= 0) return;  // nobody can be told
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

std::string thread_name() {
  std::array<char, 16> name{};  // with its end: pthread_getname_np(3)
  if (::pthread_getname_np(::pthread_self(), name.data(), name.size()) != 0) return "?";
  return name.data();
}

void apply(const Levels& levels) {
  for (std::size_t index = 0; index < kComponents; ++index)
    detail::thresholds[index].level.store(static_cast<std::int8_t>(levels[index]), std::memory_order_relaxed);
}

}  // namespace

std::string_view to_string(Level level) {
  return level == Level::off ? "off" : kLevelNames[static_cast<std::size_t>(level)];
}

std::string_view to_string(Component component) {
  return kComponentNames[static_cast<std::size_t>(component)];
}

ParsedLevels parse(std::string_view text) {
  std::vector<std::string_view> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    words.push_back(trimmed(text.substr(begin, comma - begin)));
    begin = comma + 1;
  }
  ParsedLevels parsed{.levels = all_at(Level::off), .error = {}};
  const std::size_t level = index_of(kLevelNames, words.front());
  if (level == kLevelNames.size()) {
    parsed.error = fmt::format(
        "\"{}\" is not a level; begin with one of {}, as in {}=info,engine; unset the variable "
        "to log nothing",
        words.front(), joined(kLevelNames), kVariable);
    return parsed;
  }
  if (words.size() == 1) parsed.levels = all_at(static_cast<Level>(level));
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::size_t component = index_of(kComponentNames, words[i]);
    if (component == kComponents) {
      return {.levels = all_at(Level::off),
              .error =
                  fmt::format("unknown component \"{}\"; use some of {}", words[i], joined(kComponentNames))};
    }
    parsed.levels[component] = static_cast<Level>(level);
  }
  return parsed;
}

const std::optional<Levels>& levels_from_environment() {
  static const std::optional<Levels> levels = []() -> std::optional<Levels> {
    const char* text = std::getenv(kVariable);  // NOLINT(concurrency-mt-unsafe)
    if (text == nullptr || *text == '\0') return std::nullopt;
    const ParsedLevels parsed = parse(text);
    if (parsed.error.empty()) return parsed.levels;
    write_all(fmt::format("trunkline: {}={} is ignored: {}\n", kVariable, text, parsed.error));
    return std::nullopt;
  }();
  return levels;
}

void set_levels(const Levels& levels) { apply(levels); }

Sink set_sink(Sink sink) { return current_sink.exchange(sink); }

std::string format_line(const Record& record) {
  const auto since_epoch = record.time.time_since_epoch();
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(since_epoch).count() % 1000;
  const std::time_t seconds = std::chrono::system_clock::to_time_t(record.time);
  std::tm local{};
  ::localtime_r(&seconds, &local);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03} {:<5} {} [{}] {}\n", local, milliseconds,
                     to_string(record.level), to_string(record.component), record.thread, record.message);
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): a Sink
void write_to_stderr(Record record) { write_all(format_line(record)); }

namespace detail {

bool is_wanted_by_environment(Component component, Level level) {
  const Levels levels = levels_from_environment().value_or(all_at(Level::off));
  const auto index = static_cast<std::size_t>(component);
  // Unless someone has set the levels meanwhile.
  std::int8_t unread = kUnread;
  thresholds[index].level.compare_exchange_strong(unread, static_cast<std::int8_t>(levels[index]));
  return static_cast<std::int8_t>(level) <= thresholds[index].level.load(std::memory_order_relaxed);
}

void write(Component component, Level level, fmt::string_view text, fmt::format_args arguments) noexcept {
  try {
    current_sink.load()({.level = level,
                         .component = component,
                         .time = std::chrono::system_clock::now(),
                         .thread = thread_name(),
                         .message = fmt::vformat(text, arguments)});
  } catch (...) {  // NOLINT(bugprone-empty-catch): out of memory; a record is not worth an operation
  }
}

}  // namespace detail

std::optional<std::uint64_t> RateLimit::admit(std::chrono::steady_clock::time_point now) {
  const Ticks ticks = now.time_since_epoch().count();
  Ticks last = last_.load(std::memory_order_relaxed);
  const bool is_due = last == kNever || ticks - last >= interval_.count();
  if (!is_due || !last_.compare_exchange_strong(last, ticks, std::memory_order_relaxed)) {
    held_back_.fetch_add(1, std::memory_order_relaxed);
    return std::nullopt;
  }
  return held_back_.exchange(0, std::memory_order_relaxed);
}

}  // namespace trunkline::log
