// A trace: when each operation, transfer, wait, copy and checksum began and ended, on which thread.
//
// While no trace is recorded an event costs one relaxed load. While one is, each thread writes its events
// into a ring of its own, without a lock and without allocating, and the oldest are overwritten when the ring
// is full. What reads the rings (collect) never makes a writer wait: it drops what was overwritten while it
// read.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace trunkline::trace {

// Another one gets a name in trace_json.cpp, and a colour in scripts/draw_trace.py.
enum class Category : std::uint8_t { operation, transfer, wait, copy, checksum, checkpoint, stream };
constexpr std::size_t kCategories = static_cast<std::size_t>(Category::stream) + 1;

// What an event is. Events refer to their kind, so kinds are constants that live as long as the process.
struct Kind {
  const char* name;
  Category category;
  enum class Fields : std::uint8_t { none, bytes, range } fields = Fields::none;  // range: offset and bytes
};

enum class IoPath : std::uint32_t { none, direct, bounced, buffered, gds };
constexpr std::size_t kIoPaths = static_cast<std::size_t>(IoPath::gds) + 1;

constexpr std::uint32_t kNoText = 0;
using ThreadNumber = std::uint16_t;
constexpr ThreadNumber kNoThread = 0;

// Times are of now(). A start of 0 is one that was not recorded, as tracing was off: then there is no event.
struct Event {
  const Kind* kind = nullptr;
  std::uint64_t start_ns = 0;
  std::uint64_t end_ns = 0;
  ThreadNumber thread = kNoThread;  // record() fills it in
  ThreadNumber caller = kNoThread;  // of an operation: the thread that began it, where it is drawn
  IoPath io_path = IoPath::none;
  std::uint32_t text = kNoText;    // a path, a unit's name: intern()
  std::uint32_t device = kNoText;  // of copies to and from a GPU: its name, which is their track
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::int64_t result = 0;  // bytes, or a negative errno
};
static_assert(sizeof(Event) == 64, "one cache line");

namespace detail {
inline std::atomic<std::uint32_t> session{0};  // 0: no trace is recorded
std::uint32_t intern_slowly(std::string_view text);
}  // namespace detail

inline bool is_on() { return detail::session.load(std::memory_order_relaxed) != 0; }

inline std::uint64_t now() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

// When something begins: 0 while no trace is recorded.
inline std::uint64_t start() { return is_on() ? now() : 0; }

// Records an event of this thread, unless no trace is recorded or its start was not. Never blocks for long:
// the first event of a thread allocates its ring.
void record(const Event& event);

// The number of a text in the trace that is recorded. Takes a lock: what happens often keeps it (Text).
inline std::uint32_t intern(std::string_view text) {
  return is_on() && !text.empty() ? detail::intern_slowly(text) : kNoText;
}

// The number of one text, remembered for as long as the same trace is recorded. Thread-safe.
class Text {
 public:
  std::uint32_t of(std::string_view text) {
    const std::uint32_t session = detail::session.load(std::memory_order_relaxed);
    const std::uint64_t known = known_.load(std::memory_order_relaxed);
    if (known >> 32 == session) return static_cast<std::uint32_t>(known);
    const std::uint32_t number = intern(text);
    known_.store(std::uint64_t{session} << 32 | number, std::memory_order_relaxed);
    return number;
  }

 private:
  std::atomic<std::uint64_t> known_{0};  // session and number
};

// This thread's number in the trace that is recorded, for Event::caller.
ThreadNumber this_thread();

// Names this thread in traces, instead of by what the kernel calls it. A lane's transfers overlap: they get a
// group of tracks of their own.
enum class Role : std::uint8_t { thread, lane };
void name_this_thread(std::string name, Role role);

// Records an event from its construction to its destruction. `text` must outlive it.
class Span {
 public:
  explicit Span(const Kind& kind, std::string_view text = {}, std::uint64_t bytes = 0)
      : kind_(&kind), text_(text), start_ns_(start()), bytes_(bytes) {}
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  ~Span() {
    if (start_ns_ != 0) finish();
  }

 private:
  void finish() noexcept;

  const Kind* kind_;
  std::string_view text_;
  std::uint64_t start_ns_;
  std::uint64_t bytes_;
};

// What was recorded.
struct Thread {
  std::string name;
  Role role = Role::thread;
  int id = 0;  // the kernel's
};
struct Recording {
  std::uint64_t start_ns = 0;
  std::uint64_t end_ns = 0;
  std::chrono::system_clock::time_point started;
  std::vector<Event> events;         // of all threads, by their starts
  std::vector<Thread> threads;       // by number; the first stands for none
  std::vector<std::string> texts;    // by number; the first is empty
  std::uint64_t dropped_events = 0;  // overwritten by later ones
};

// Of one thread, at most; the memory of a ring is 64 times as many bytes, taken as it is first written.
constexpr std::uint64_t kEventsPerThread = 1 << 16;

// Begins to record; false where a trace is recorded already.
bool begin();
// Ends it. Events that begin from now on are of no trace.
Recording collect();

}  // namespace trunkline::trace
