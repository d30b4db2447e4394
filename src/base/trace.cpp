#include "base/trace.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

namespace trunkline::trace {
namespace {

constexpr std::size_t kWords = sizeof(Event) / sizeof(std::uint64_t);
// Threads and texts beyond these are left out, so that a trace of days stays bounded, too.
constexpr std::size_t kMostThreads = 1 << 14;
constexpr std::size_t kMostTexts = 1 << 16;

using Words = std::array<std::uint64_t, kWords>;

// The events of one thread at a time, in the order of their ends.
//
// 1. The writer announces event n (begun_), stores its words, and publishes it (done_).
// 2. The reader copies the events that are published, then looks at begun_ again: what a writer had begun to
//    overwrite by then may be torn, and is dropped.
// A word that is read from event n was stored after begun_ was, and with release: who reads it with acquire
// finds n announced. On x86 all of this is plain moves.
class Ring {
 public:
  Ring() : words_(map()) {}
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (words_ != nullptr) ::munmap(words_, kBytes);
  }

  bool valid() const { return words_ != nullptr; }

  void append(const Event& event, ThreadNumber thread) {
    Event stored = event;
    stored.thread = thread;
    const auto words = std::bit_cast<Words>(stored);
    const std::uint64_t number = done_.load(std::memory_order_relaxed);
    begun_.store(number + 1, std::memory_order_relaxed);
    std::atomic<std::uint64_t>* slot = words_ + number % kEventsPerThread * kWords;
    for (std::size_t i = 0; i < kWords; ++i) slot[i].store(words[i], std::memory_order_release);
    done_.store(number + 1, std::memory_order_release);
    // The next event should not wait for its cache line.
    __builtin_prefetch(words_ + (number + 1) % kEventsPerThread * kWords, 1);
  }

  // What comes next is the first event of a recording.
  void begin() { first_ = done_.load(std::memory_order_acquire); }

  // Appends to `events`; returns how many are missing.
  std::uint64_t read(std::vector<Event>& events) const {
    const std::uint64_t end = done_.load(std::memory_order_acquire);
    const std::uint64_t begin = std::max(first_, end - std::min(end, kEventsPerThread));
    const std::size_t before = events.size();
    for (std::uint64_t number = begin; number < end; ++number) {
      const std::atomic<std::uint64_t>* slot = words_ + number % kEventsPerThread * kWords;
      Words words;
      for (std::size_t i = 0; i < kWords; ++i) words[i] = slot[i].load(std::memory_order_acquire);
      events.push_back(std::bit_cast<Event>(words));
    }
    const std::uint64_t begun = begun_.load(std::memory_order_relaxed);
    const std::uint64_t whole = std::clamp(begun - std::min(begun, kEventsPerThread), begin, end);
    const auto torn = static_cast<std::ptrdiff_t>(whole - begin);
    const auto first = events.begin() + static_cast<std::ptrdiff_t>(before);
    events.erase(first, first + torn);
    return whole - first_;
  }

  // Lets the kernel take the memory when it needs some. Until then, the next trace finds it mapped, and need
  // not wait for pages. A late event may be lost, which is of no trace.
  void forget() { ::madvise(words_, kBytes, MADV_FREE); }

  bool is_used = false;  // by a thread; guarded by the registry's lock

 private:
  static constexpr std::size_t kBytes = kEventsPerThread * sizeof(Event);

  static std::atomic<std::uint64_t>* map() {
    void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    ::madvise(memory, kBytes, MADV_HUGEPAGE);  // fewer page faults among the events; refused is fine
    return static_cast<std::atomic<std::uint64_t>*>(memory);
  }

  std::atomic<std::uint64_t>* words_;
  std::atomic<std::uint64_t> begun_{0};
  std::atomic<std::uint64_t> done_{0};
  std::uint64_t first_ = 0;
};

struct Registry {
  std::mutex mutex;
  std::uint32_t session = 0;  // of the recording; 0: none
  std::deque<Ring> rings;     // never destroyed: threads may write until the process ends
  std::vector<Thread> threads{Thread{}};
  std::unordered_map<std::string, std::uint32_t> numbers;
  std::vector<std::string> texts{std::string()};
  std::uint64_t start_ns = 0;
  std::chrono::system_clock::time_point started;
};

// Registries are never destroyed: threads may record until the end. A forked child begins with an empty
// registry: the lock of its parent's may be held.
std::atomic<Registry*> current{nullptr};
std::uint32_t last_session = 0;  // guarded by the registry's lock

struct ThreadState {
  Ring* ring = nullptr;
  std::uint32_t session = 0;  // in which it has its number
  ThreadNumber number = kNoThread;
  bool has_ended = false;
};
constinit thread_local ThreadState thread_state;

struct GivenName {
  std::string name;
  Role role = Role::thread;
};
thread_local GivenName given_name;

// Hands the ring on to the next thread. Its events stay until they are overwritten.
struct RingRelease {
  RingRelease() = default;
  RingRelease(const RingRelease&) = delete;
  RingRelease& operator=(const RingRelease&) = delete;
  ~RingRelease() {
    Registry& registry = *current.load();
    const std::scoped_lock lock(registry.mutex);
    if (thread_state.ring != nullptr) thread_state.ring->is_used = false;
    thread_state = {.has_ended = true};
  }
};

void forget_parent() {
  detail::session.store(0, std::memory_order_relaxed);
  thread_state = {};
  current.store(new Registry);  // the parent's is left as it is
}

Registry& registry() {
  static const bool created = [] {
    current.store(new Registry);
    ::pthread_atfork(nullptr, nullptr, forget_parent);
    return true;
  }();
  (void)created;
  return *current.load();
}

Thread describe_this_thread() {
  Thread thread{.name = given_name.name, .role = given_name.role, .id = ::gettid()};
  if (!thread.name.empty()) return thread;
  std::array<char, 16> name{};  // with its end: pthread_getname_np(3)
  if (::gettid() == ::getpid())
    thread.name = "main thread";
  else if (::pthread_getname_np(::pthread_self(), name.data(), name.size()) == 0)
    thread.name = name.data();
  return thread;
}

Ring* take_ring(Registry& registry) {
  const auto unused = std::ranges::find(registry.rings, false, &Ring::is_used);
  if (unused != registry.rings.end()) {
    unused->is_used = true;
    return &*unused;
  }
  Ring& ring = registry.rings.emplace_back();
  ring.is_used = ring.valid();
  if (ring.valid()) return &ring;
  registry.rings.pop_back();
  return nullptr;
}

// The first event of this thread in the recording. False: it can have none.
bool enter(std::uint32_t session) {
  if (thread_state.has_ended) return false;
  try {
    Registry& all = registry();
    const std::scoped_lock lock(all.mutex);
    if (all.session != session || all.threads.size() >= kMostThreads) return false;
    if (thread_state.ring == nullptr) {
      static thread_local const RingRelease release;
      (void)release;
      thread_state.ring = take_ring(all);
      if (thread_state.ring == nullptr) return false;
    }
    all.threads.push_back(describe_this_thread());
    thread_state.number = static_cast<ThreadNumber>(all.threads.size() - 1);
    thread_state.session = session;
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace

void record(const Event& event) {
  const std::uint32_t session = detail::session.load(std::memory_order_relaxed);
  if (session == 0 || event.start_ns == 0) return;
  if (thread_state.session != session && !enter(session)) return;
  thread_state.ring->append(event, thread_state.number);
}

ThreadNumber this_thread() {
  const std::uint32_t session = detail::session.load(std::memory_order_relaxed);
  if (session == 0 || (thread_state.session != session && !enter(session))) return kNoThread;
  return thread_state.number;
}

void name_this_thread(std::string name, Role role) { given_name = {.name = std::move(name), .role = role}; }

std::uint32_t detail::intern_slowly(std::string_view text) {
  try {
    Registry& all = registry();
    const std::scoped_lock lock(all.mutex);
    const auto known = all.numbers.find(std::string(text));
    if (known != all.numbers.end()) return known->second;
    if (all.texts.size() >= kMostTexts) return kNoText;
    all.texts.emplace_back(text);
    const auto number = static_cast<std::uint32_t>(all.texts.size() - 1);
    all.numbers.emplace(text, number);
    return number;
  } catch (const std::bad_alloc&) {
    return kNoText;
  }
}

void Span::finish() noexcept {
  record({.kind = kind_, .start_ns = start_ns_, .end_ns = now(), .text = intern(text_), .bytes = bytes_});
}

bool begin() {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  if (all.session != 0) return false;
  all.threads.resize(1);
  all.texts.resize(1);
  all.numbers.clear();
  for (Ring& ring : all.rings) ring.begin();
  all.start_ns = now();
  all.started = std::chrono::system_clock::now();
  all.session = ++last_session;
  detail::session.store(all.session, std::memory_order_relaxed);
  return true;
}

Recording collect() {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  detail::session.store(0, std::memory_order_relaxed);
  all.session = 0;
  Recording recording{.start_ns = all.start_ns,
                      .end_ns = now(),
                      .started = all.started,
                      .events = {},
                      .threads = all.threads,
                      .texts = all.texts};
  for (Ring& ring : all.rings) {
    recording.dropped_events += ring.read(recording.events);
    ring.forget();
  }
  // A thread may publish its last event of an earlier recording in this one.
  std::erase_if(recording.events, [&](const Event& event) {
    return event.start_ns < all.start_ns || event.thread >= recording.threads.size();
  });
  // Of two that begin at the same time, the longer one is around the other.
  std::ranges::sort(recording.events, [](const Event& a, const Event& b) {
    return a.start_ns != b.start_ns ? a.start_ns < b.start_ns : a.end_ns > b.end_ns;
  });
  return recording;
}

}  // namespace trunkline::trace
