#include "base/trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/trace_json.h"

namespace trunkline::trace {
namespace {

constexpr Kind kRead{"read", Category::transfer, Kind::Fields::range};
constexpr Kind kOperation{"read", Category::operation, Kind::Fields::range};
constexpr Kind kCopy{"copy", Category::copy, Kind::Fields::bytes};
constexpr Kind kCommit{"commit", Category::checkpoint};

std::string json_of(const Recording& recording) {
  std::string text;
  const JsonOptions options{.device_of = [](const std::string&) { return std::string("/dev/one"); }};
  write_json(recording, options, [&](std::string_view part) { text += part; });
  return text;
}

nlohmann::json parsed(const Recording& recording) { return nlohmann::json::parse(json_of(recording)); }

Recording recording_of(std::vector<Thread> threads, std::vector<std::string> texts) {
  Recording recording;
  recording.threads = std::move(threads);
  recording.texts = std::move(texts);
  return recording;
}

// Those of the named phase.
std::vector<nlohmann::json> of_phase(const nlohmann::json& trace, const std::string& phase) {
  std::vector<nlohmann::json> found;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == phase) found.push_back(event);
  }
  return found;
}

TEST(Trace, NothingIsRecordedWhileItIsOff) {
  EXPECT_FALSE(is_on());
  EXPECT_EQ(start(), 0U);
  record({.kind = &kRead, .start_ns = now(), .end_ns = now()});
  ASSERT_TRUE(begin());
  EXPECT_TRUE(collect().events.empty());
}

TEST(Trace, OnlyOneIsRecordedAtATime) {
  ASSERT_TRUE(begin());
  EXPECT_FALSE(begin());
  collect();
  EXPECT_TRUE(begin());
  collect();
}

TEST(Trace, AnEventThatBeganBeforeIsLeftOut) {
  const std::uint64_t before = now();
  ASSERT_TRUE(begin());
  record({.kind = &kRead, .start_ns = before, .end_ns = now()});
  record({.kind = &kRead, .start_ns = 0, .end_ns = now()});
  record({.kind = &kRead, .start_ns = start(), .end_ns = now()});
  EXPECT_EQ(collect().events.size(), 1U);
}

TEST(Trace, EventsHaveTheirThreadTextAndNumbers) {
  ASSERT_TRUE(begin());
  const std::uint64_t began = start();
  record({.kind = &kRead,
          .start_ns = began,
          .end_ns = began + 1500,
          .io_path = IoPath::direct,
          .text = intern("/data/a"),
          .offset = 4096,
          .bytes = 100,
          .result = -EIO});
  {
    const Span span(kCommit, "step 3");
  }
  const Recording recording = collect();
  ASSERT_EQ(recording.events.size(), 2U);
  const Event& event = recording.events[0];
  EXPECT_EQ(recording.texts[event.text], "/data/a");
  EXPECT_EQ(event.result, -EIO);
  EXPECT_EQ(recording.threads[event.thread].id, ::gettid());
  const auto slices = of_phase(parsed(recording), "X");
  ASSERT_EQ(slices.size(), 2U);
  EXPECT_EQ(slices[0]["dur"], 1.5);
  EXPECT_EQ(slices[0]["cat"], "operation,transfer");
  EXPECT_EQ(slices[0]["args"], nlohmann::json::parse(R"({"of": "/data/a", "offset": 4096, "bytes": 100,
                                                         "path": "direct", "result": "EIO"})"));
  EXPECT_EQ(slices[1]["args"]["of"], "step 3");
}

TEST(Trace, AFullRingDropsTheOldestAndCountsThem) {
  ASSERT_TRUE(begin());
  for (std::uint64_t i = 0; i < kEventsPerThread + 10; ++i)
    record({.kind = &kRead, .start_ns = now(), .end_ns = now(), .offset = i});
  const Recording recording = collect();
  EXPECT_EQ(recording.events.size(), kEventsPerThread);
  EXPECT_EQ(recording.dropped_events, 10U);
  EXPECT_EQ(recording.events.front().offset, 10U);
}

TEST(Trace, RingsOfThreadsThatEndedServeOthers) {
  constexpr std::uint64_t kEach = kEventsPerThread / 2 + 10;  // those of two threads do not fit into one ring
  ASSERT_TRUE(begin());
  for (int i = 0; i < 2; ++i) {
    std::thread([] {
      for (std::uint64_t event = 0; event < kEach; ++event)
        record({.kind = &kCopy, .start_ns = now(), .end_ns = now(), .bytes = 1});
    }).join();
  }
  const Recording recording = collect();
  EXPECT_EQ(recording.events.size(), kEventsPerThread);
  EXPECT_EQ(recording.dropped_events, 20U);
  EXPECT_EQ(recording.threads.size(), 3U);  // the first stands for no thread
}

TEST(Trace, AThreadIsNumberedAnewInEachTrace) {
  const auto record_here = [] { record({.kind = &kRead, .start_ns = now(), .end_ns = now()}); };
  ASSERT_TRUE(begin());
  record_here();
  ASSERT_EQ(collect().events.at(0).thread, 1U);
  ASSERT_TRUE(begin());
  std::thread(record_here).join();  // the first of this trace
  record_here();
  const Recording recording = collect();
  ASSERT_EQ(recording.events.size(), 2U);
  ASSERT_EQ(recording.threads.size(), 3U);
  const auto mine = std::ranges::count_if(recording.events, [&](const Event& event) {
    return recording.threads.at(event.thread).id == ::gettid();
  });
  EXPECT_EQ(mine, 1);
}

TEST(Trace, ATextIsInternedAnewInEachTrace) {
  Text text;
  EXPECT_EQ(text.of("/a"), kNoText);
  ASSERT_TRUE(begin());
  const std::uint32_t number = text.of("/a");
  EXPECT_NE(number, kNoText);
  EXPECT_EQ(text.of("/a"), number);
  EXPECT_EQ(collect().texts[number], "/a");
  ASSERT_TRUE(begin());
  EXPECT_EQ(collect().texts.size(), 1U);
  ASSERT_TRUE(begin());
  EXPECT_EQ(intern("/other"), number);  // so that a number of the first trace would name another text
  const std::uint32_t again = text.of("/a");
  EXPECT_EQ(collect().texts.at(again), "/a");
  EXPECT_EQ(text.of("/a"), kNoText);  // nothing is recorded
}

TEST(TraceJson, SaysHowManyEventsAreMissing) {
  Recording recording;
  recording.threads.resize(1);
  recording.texts.resize(1);
  recording.dropped_events = 10;
  EXPECT_EQ(parsed(recording)["otherData"]["dropped_events"], 10);
}

TEST(TraceJson, TransfersOfALaneThatOverlapGetTracksOfTheirOwn) {
  Recording recording = recording_of({{}, {.name = "lane 0", .role = Role::lane}}, {""});
  for (const auto& [from, to] :
       std::vector<std::pair<std::uint64_t, std::uint64_t>>{{10, 30}, {20, 40}, {30, 50}})
    recording.events.push_back({.kind = &kRead, .start_ns = from, .end_ns = to, .thread = 1});
  const auto slices = of_phase(parsed(recording), "X");
  ASSERT_EQ(slices.size(), 3U);
  EXPECT_EQ(slices[0]["tid"], 1);
  EXPECT_EQ(slices[1]["tid"], 2);
  EXPECT_EQ(slices[2]["tid"], 1);
  EXPECT_EQ(slices[2]["cat"], "transfer");
}

TEST(TraceJson, AnOperationIsAnAsynchronousSliceOfItsCaller) {
  Recording recording = recording_of({{}, {.name = "main"}, {.name = "lane"}}, {""});
  recording.events.push_back({.kind = &kOperation, .start_ns = 10, .end_ns = 20, .thread = 2, .caller = 1});
  const auto trace = parsed(recording);
  const auto begins = of_phase(trace, "b");
  const auto ends = of_phase(trace, "e");
  ASSERT_EQ(begins.size(), 1U);
  ASSERT_EQ(ends.size(), 1U);
  EXPECT_EQ(begins[0]["id"], ends[0]["id"]);
  EXPECT_EQ(begins[0]["tid"], 1);
}

TEST(TraceJson, BytesInFlightOnADeviceAreACounter) {
  Recording recording = recording_of({{}, {.name = "lane 0", .role = Role::lane}}, {"", "/a"});
  recording.events.push_back(
      {.kind = &kRead, .start_ns = 1000, .end_ns = 3000, .thread = 1, .text = 1, .bytes = 5});
  recording.events.push_back(
      {.kind = &kRead, .start_ns = 2000, .end_ns = 3000, .thread = 1, .text = 1, .bytes = 7});
  std::vector<std::int64_t> bytes;
  for (const auto& counter : of_phase(parsed(recording), "C")) bytes.push_back(counter["args"]["bytes"]);
  EXPECT_EQ(bytes, (std::vector<std::int64_t>{5, 12, 0}));
}

TEST(TraceJson, NamesThatAreNotUtf8AndQuotesGiveValidJson) {
  ASSERT_TRUE(begin());
  {
    const Span span(kCommit, "a \"quoted\" \xff name\n");
  }
  const auto slices = of_phase(parsed(collect()), "X");
  ASSERT_EQ(slices.size(), 1U);
  EXPECT_EQ(slices[0]["args"]["of"], "a \"quoted\" \xEF\xBF\xBD name\n");
}

TEST(Trace, IsValidWhileThreadsGoOnRecording) {
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> written{0};
  std::vector<std::thread> writers;
  writers.reserve(3);
  for (int i = 0; i < 3; ++i) {
    writers.emplace_back([&] {
      Text path;
      while (!stop.load()) {
        const std::uint64_t began = start();
        record(
            {.kind = &kRead, .start_ns = began, .end_ns = began + 7, .text = path.of("/a"), .offset = began});
        written.fetch_add(1);
      }
    });
  }
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(begin());
    const std::uint64_t before = written.load();
    while (written.load() < before + 2 * kEventsPerThread) std::this_thread::yield();
    Recording recording = collect();
    for (const Event& event : recording.events) {
      ASSERT_EQ(event.kind, &kRead);
      ASSERT_EQ(event.offset, event.start_ns);  // not torn
      ASSERT_EQ(event.end_ns, event.start_ns + 7);
      ASSERT_EQ(recording.texts[event.text], "/a");
    }
    EXPECT_FALSE(recording.events.empty());
    recording.events.resize(std::min<std::size_t>(recording.events.size(), 1000));
    EXPECT_EQ(of_phase(parsed(recording), "X").size(), recording.events.size());
  }
  stop.store(true);
  for (std::thread& writer : writers) writer.join();
}

}  // namespace
}  // namespace trunkline::trace
