#include "base/trace_json.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/utc_time.h"
#include "trunkline/error.h"

namespace trunkline::trace {
namespace {

constexpr std::array kCategoryNames = {"operation", "transfer",   "wait",  "copy",
                                       "checksum",  "checkpoint", "stream"};
constexpr std::array kPathNames = {"", "direct", "bounced", "buffered", "gds"};
static_assert(kCategoryNames.size() == kCategories && kPathNames.size() == kIoPaths);

constexpr std::size_t kFlushBytes = 1 << 20;

// Of the format's "processes", which are what viewers group tracks by.
constexpr std::uint32_t kThreadsGroup = 1;
constexpr std::uint32_t kStorageGroup = 2;
constexpr std::uint32_t kFirstOtherGroup = 10;

struct Track {
  std::uint32_t group = 0;
  std::uint32_t row = 0;
};

// A text in quotes. Paths are bytes: what is not UTF-8 is replaced.
std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Tracks of events that overlap: each gets the first row that is free when it begins. Events come by their
// starts.
class Rows {
 public:
  std::uint32_t row_for(const Event& event) {
    const auto free =
        std::ranges::find_if(ends_, [&](const std::uint64_t end) { return end <= event.start_ns; });
    const auto row = static_cast<std::uint32_t>(free - ends_.begin());
    if (free == ends_.end()) ends_.emplace_back();
    ends_[row] = event.end_ns;
    return row;
  }
  std::size_t size() const { return ends_.size(); }

 private:
  std::vector<std::uint64_t> ends_;
};

class Writer {
 public:
  Writer(const Recording& recording, const JsonOptions& options,
         const std::function<void(std::string_view)>& write)
      : recording_(recording), options_(options), write_(write) {
    for (const std::string& text : recording.texts) texts_.push_back(quoted(text));
  }

  void write_all() {
    text_ = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n";
    for (const Event& event : recording_.events) write_event(event);
    write_storage();
    write_names();
    fmt::format_to(std::back_inserter(text_),
                   "\n],\"otherData\":{{\"process\":{},\"started\":\"{}\","
                   "\"seconds\":{:.6f},\"events\":{},\"dropped_events\":{}}}}}\n",
                   ::getpid(), utc_time(std::chrono::system_clock::to_time_t(recording_.started)),
                   static_cast<double>(recording_.end_ns - recording_.start_ns) / 1e9,
                   recording_.events.size(), recording_.dropped_events);
    write_(text_);
  }

 private:
  std::back_insert_iterator<std::string> out() {
    if (text_.size() > kFlushBytes) {
      write_(text_);
      text_.clear();
    }
    text_ += std::exchange(is_first_, false) ? "" : ",\n";
    return std::back_inserter(text_);
  }

  // Microseconds from the beginning of the recording, with three decimals.
  std::string micros(std::uint64_t ns) const {
    ns -= std::min(ns, recording_.start_ns);
    return fmt::format("{}.{:03}", ns / 1000, ns % 1000);
  }

  bool is_of_lane(const Event& event) const { return recording_.threads[event.thread].role == Role::lane; }

  std::uint32_t group_of(std::map<std::uint32_t, std::uint32_t>& groups, std::uint32_t key) {
    const auto [found, is_new] = groups.emplace(key, next_group_);
    next_group_ += is_new ? 1 : 0;
    return found->second;
  }

  Track track_of(const Event& event) {
    if (event.device != kNoText) {
      const std::uint32_t group = group_of(device_groups_, event.device);
      return {group, rows_[group].row_for(event)};
    }
    if (!is_of_lane(event)) return {kThreadsGroup, event.thread};
    const std::uint32_t group = group_of(lane_groups_, event.thread);
    if (event.kind->category != Category::transfer) return {group, 0};
    return {group, rows_[group].row_for(event) + 1};
  }

  void write_event(const Event& event) {
    const char* category = kCategoryNames[static_cast<std::size_t>(event.kind->category)];
    if (event.caller != kNoThread) {
      const std::string common =
          fmt::format("\"cat\":\"{}\",\"name\":\"{}\",\"id\":{},\"pid\":{},\"tid\":{}", category,
                      event.kind->name, next_id_++, kThreadsGroup, event.caller);
      fmt::format_to(out(), "{{\"ph\":\"b\",{},\"ts\":{}{}}}", common, micros(event.start_ns),
                     args_of(event));
      fmt::format_to(out(), "{{\"ph\":\"e\",{},\"ts\":{}}}", common, micros(event.end_ns));
      return;
    }
    const Track track = track_of(event);
    // What a small blocking call reads or writes is operation and transfer at once.
    if (event.kind->category == Category::transfer && !is_of_lane(event)) category = "operation,transfer";
    const std::uint64_t duration = event.end_ns - std::min(event.start_ns, event.end_ns);
    fmt::format_to(
        out(),
        "{{\"ph\":\"X\",\"cat\":\"{}\",\"name\":\"{}\",\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{}.{:03}{}}}",
        category, event.kind->name, track.group, track.row, micros(event.start_ns), duration / 1000,
        duration % 1000, args_of(event));
  }

  std::string args_of(const Event& event) const {
    std::string args;
    const auto add = [&](std::string_view name, const auto& value) {
      fmt::format_to(std::back_inserter(args), "{}\"{}\":{}", args.empty() ? "" : ",", name, value);
    };
    if (event.text < texts_.size() && event.text != kNoText) add("of", texts_[event.text]);
    if (event.kind->fields == Kind::Fields::range) add("offset", event.offset);
    if (event.kind->fields != Kind::Fields::none) add("bytes", event.bytes);
    if (event.io_path != IoPath::none)
      add("path", fmt::format("\"{}\"", kPathNames[static_cast<std::size_t>(event.io_path)]));
    const bool has_result =
        event.kind->category == Category::operation || event.kind->category == Category::transfer;
    if (event.result < 0)
      add("result", quoted(std::string(errno_name(static_cast<int>(-event.result)))));
    else if (has_result)
      add("result", event.result);
    return args.empty() ? args : fmt::format(",\"args\":{{{}}}", args);
  }

  // Bytes in flight on each device, as counters.
  void write_storage() {
    std::map<std::string, std::map<std::uint64_t, std::int64_t>> changes;  // by device and time
    std::map<std::uint32_t, std::string> devices;                          // by the number of the path
    for (const Event& event : recording_.events) {
      if (event.kind->category != Category::transfer || event.text == kNoText || !options_.device_of)
        continue;
      auto device = devices.find(event.text);
      if (device == devices.end())
        device = devices.emplace(event.text, options_.device_of(recording_.texts[event.text])).first;
      if (device->second.empty()) continue;
      auto& of_device = changes[device->second];
      of_device[event.start_ns] += static_cast<std::int64_t>(event.bytes);
      of_device[event.end_ns] -= static_cast<std::int64_t>(event.bytes);
    }
    for (const auto& [device, of_device] : changes) {
      const std::string name = quoted(device + " bytes in flight");
      std::int64_t bytes = 0;
      for (const auto& [time, change] : of_device) {
        if (change == 0) continue;
        bytes += change;
        fmt::format_to(
            out(), "{{\"ph\":\"C\",\"name\":{},\"pid\":{},\"tid\":0,\"ts\":{},\"args\":{{\"bytes\":{}}}}}",
            name, kStorageGroup, micros(time), bytes);
      }
    }
    if (!changes.empty()) name_group(kStorageGroup, "storage");
  }

  void name_group(std::uint32_t group, const std::string& name) {
    fmt::format_to(out(),
                   "{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{},\"tid\":0,\"args\":{{\"name\":{}}}}}",
                   group, quoted(name));
    fmt::format_to(out(),
                   "{{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":{},\"tid\":0,\"args\":{{\"sort_"
                   "index\":{}}}}}",
                   group, group);
  }

  void name_track(Track track, const std::string& name) {
    fmt::format_to(out(),
                   "{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":{}}}}}",
                   track.group, track.row, quoted(name));
    fmt::format_to(out(),
                   "{{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":{},\"tid\":{},\"args\":{{\"sort_"
                   "index\":{}}}}}",
                   track.group, track.row, track.row);
  }

  void write_names() {
    name_group(kThreadsGroup, "threads");
    for (std::uint32_t number = 1; number < recording_.threads.size(); ++number) {
      const Thread& thread = recording_.threads[number];
      if (thread.role == Role::lane) continue;
      name_track({kThreadsGroup, number}, fmt::format("{} ({})", thread.name, thread.id));
    }
    for (const auto& [thread, group] : lane_groups_) {
      name_group(group, recording_.threads[thread].name);
      name_track({group, 0}, "copies and waits");
      for (std::uint32_t row = 0; row < rows_[group].size(); ++row)
        name_track({group, row + 1}, "transfers in flight");
    }
    for (const auto& [device, group] : device_groups_) {
      name_group(group, recording_.texts[device]);
      for (std::uint32_t row = 0; row < rows_[group].size(); ++row)
        name_track({group, row}, "copies in flight");
    }
  }

  const Recording& recording_;
  const JsonOptions& options_;
  const std::function<void(std::string_view)>& write_;
  std::vector<std::string> texts_;  // quoted, by number
  std::string text_;                // not written yet
  bool is_first_ = true;
  std::uint64_t next_id_ = 1;
  std::uint32_t next_group_ = kFirstOtherGroup;
  std::map<std::uint32_t, std::uint32_t> lane_groups_;    // by thread
  std::map<std::uint32_t, std::uint32_t> device_groups_;  // by text
  std::map<std::uint32_t, Rows> rows_;                    // by group
};

}  // namespace

void write_json(const Recording& recording, const JsonOptions& options,
                const std::function<void(std::string_view)>& write) {
  Writer(recording, options, write).write_all();
}

}  // namespace trunkline::trace
