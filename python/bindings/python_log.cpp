// Records wait in a queue for the thread that delivers them: only that thread runs handlers, as long as it
// runs. A thread that logs waits neither for the GIL nor for a handler or a lock of Python's logging. A
// signal handler may have interrupted the owner of that lock, and wait for the save that the logging thread
// carries out.
#include "python_log.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/log.h"
#include "bindings.h"
#include "gil.h"
#include "os/signals_blocked.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

// Records beyond these are dropped while nobody can deliver: a program may keep the GIL for long.
constexpr std::size_t kMostPending = 10'000;
// Seconds that the exit, and trunkline._core.deliver_log(), wait for a handler that does not return.
constexpr std::chrono::seconds kHandlerTimeout{10};
// How often the exit looks for Ctrl-C meanwhile.
constexpr std::chrono::milliseconds kSignalInterval{50};

struct Delivery {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<log::Record> pending;
  std::uint64_t dropped = 0;
  unsigned deliveries = 0;  // under way
  bool has_thread = false;
  bool stopping = false;
};

// Never destroyed, as lanes may log until the process ends. A forked child begins with an empty one: the lock
// of its parent's may be held, and its records are the parent's to deliver.
std::atomic<Delivery*> current{nullptr};

// Python functions of trunkline._logging. Never released; no levels are adopted once delivery has stopped.
PyObject* handle_record = nullptr;
PyObject* current_levels = nullptr;

thread_local bool is_delivering = false;

// Delivers the records that are pending now. An exception of a handler is reported like one of a callback,
// and stops nothing. Needs the GIL.
void deliver(Delivery& delivery) {
  if (is_delivering) return;
  std::deque<log::Record> records;
  std::uint64_t dropped = 0;
  {
    const std::scoped_lock lock(delivery.mutex);
    if (delivery.pending.empty()) return;
    records.swap(delivery.pending);
    dropped = std::exchange(delivery.dropped, 0);
    ++delivery.deliveries;
  }
  is_delivering = true;
  const nb::handle handle(handle_record);
  if (dropped > 0) {
    records.back().message += " (" + std::to_string(dropped) + " records after it were dropped)";
  }
  for (const log::Record& record : records) {
    try {
      handle(static_cast<int>(record.level), to_string(record.component).data(),
             std::chrono::duration<double>(record.time.time_since_epoch()).count(),
             nb::bytes(record.thread.data(), record.thread.size()),
             nb::bytes(record.message.data(), record.message.size()));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("delivering a log record of trunkline");
    }
  }
  is_delivering = false;
  const std::scoped_lock lock(delivery.mutex);
  --delivery.deliveries;
  delivery.changed.notify_all();
}

// Returns once what was logged before has been delivered, also by the other thread. Needs the GIL.
void deliver_all() {
  if (handle_record == nullptr || is_delivering) return;
  Delivery& delivery = *current.load();
  deliver(delivery);
  const GilReleased unlocked;
  std::unique_lock lock(delivery.mutex);
  delivery.changed.wait_for(lock, kHandlerTimeout, [&] { return delivery.deliveries == 0; });
}

void run(Delivery& delivery) {
  pthread_setname_np(pthread_self(), "trunkline-log");
  std::unique_lock lock(delivery.mutex);
  while (true) {
    delivery.changed.wait(lock, [&] { return delivery.stopping || !delivery.pending.empty(); });
    if (delivery.stopping) break;
    lock.unlock();
    {
      const nb::gil_scoped_acquire locked;
      deliver(delivery);
    }
    lock.lock();
  }
  delivery.has_thread = false;
  delivery.changed.notify_all();  // under the lock: nothing of this is touched after it
}

// The sink. Any thread, with or without the GIL.
void enqueue(log::Record record) {
  if (is_delivering) return;  // a handler's own calls would log without end
  Delivery& delivery = *current.load();
  const std::scoped_lock lock(delivery.mutex);
  if (delivery.stopping) return;
  if (delivery.pending.size() >= kMostPending) {
    ++delivery.dropped;
    return;
  }
  delivery.pending.push_back(std::move(record));
  if (!delivery.has_thread) {
    try {
      const os::SignalsBlocked blocked;
      std::thread([&delivery] { run(delivery); }).detach();
      delivery.has_thread = true;
    } catch (const std::system_error&) {
      return;  // the exit delivers it
    }
  }
  delivery.changed.notify_all();
}

void adopt_levels() {
  const auto levels = nb::cast<std::vector<int>>(nb::handle{current_levels}());
  log::Levels adopted{};
  for (std::size_t i = 0; i < log::kComponents; ++i) adopted[i] = static_cast<log::Level>(levels.at(i));
  log::set_levels(adopted);
}

// From now on records go to `handle`, and levels come from `levels`.
void install(nb::object handle, nb::object levels) {
  handle_record = handle.release().ptr();
  current_levels = levels.release().ptr();
  current.store(new Delivery);
  pthread_atfork(nullptr, nullptr, [] {
    is_delivering = false;
    current.store(new Delivery);
  });
  log::set_sink(&enqueue);
  adopt_levels();
}

// Logs for Python code, at the levels that its loggers have now.
void log_from_python(int level, const std::string& component, const nb::bytes& message) {
  for (std::size_t i = 0; i < log::kComponents; ++i) {
    const auto each = static_cast<log::Component>(i);
    if (to_string(each) != component) continue;
    adopt_log_levels();
    const std::string_view text(message.c_str(), message.size());
    log::write(each, static_cast<log::Level>(level), "{}", text);
    return;
  }
  throw nb::value_error(("component: \"" + component + "\" is not a component of the log").c_str());
}

std::vector<std::string> components() {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < log::kComponents; ++i)
    names.emplace_back(to_string(static_cast<log::Component>(i)));
  return names;
}

// Of the components, in their order; None where TRUNKLINE_LOG is unset.
std::optional<std::vector<int>> levels_from_environment() {
  const auto& levels = log::levels_from_environment();
  if (!levels) return std::nullopt;
  std::vector<int> numbers;
  for (const log::Level level : *levels) numbers.push_back(static_cast<int>(level));
  return numbers;
}

// Ends the thread that delivers records, if there is one, once it has delivered all of them. False: a handler
// was too slow, or Ctrl-C ended the wait. Needs the GIL.
bool end_thread(Delivery& delivery) {
  const auto deadline = std::chrono::steady_clock::now() + kHandlerTimeout;
  while (true) {
    {
      const GilReleased unlocked;
      std::unique_lock lock(delivery.mutex);
      delivery.stopping = delivery.pending.empty() || !delivery.has_thread;
      delivery.changed.notify_all();
      const auto may_stop = [&] {
        return !delivery.stopping && delivery.pending.empty() && delivery.deliveries == 0;
      };
      delivery.changed.wait_for(lock, kSignalInterval, [&] { return !delivery.has_thread || may_stop(); });
      if (!delivery.has_thread) return true;
      if (std::chrono::steady_clock::now() >= deadline) {
        delivery.stopping = true;
        return false;
      }
    }
    if (PyErr_CheckSignals() != 0) {
      PyErr_Clear();  // the process is ending already
      return false;
    }
  }
}

void report_undelivered() {
  constexpr std::string_view kText =
      "trunkline: a handler of logging has not returned in time at the exit; records of the log may be "
      "missing\n";
  std::ignore = ::write(STDERR_FILENO, kText.data(), kText.size());
}

}  // namespace

void adopt_log_levels() {
  if (current_levels == nullptr) return;
  adopt_levels();  // what it raises may be of a signal handler: a time limit, for example
}

void stop_log_delivery() {
  if (handle_record == nullptr) return;
  Delivery& delivery = *current.load();
  const bool has_ended = end_thread(delivery);
  if (has_ended)
    deliver(delivery);  // what no thread could be started for
  else
    report_undelivered();
  log::Levels off;
  off.fill(log::Level::off);
  log::set_levels(log::levels_from_environment().value_or(off));
  log::set_sink(&log::write_to_stderr);
  current_levels = nullptr;
}

void register_log(nb::module_& module) {
  module.def(
      "install_log", &install, "handle"_a, "levels"_a,
      nb::sig("def install_log(handle: collections.abc.Callable[[int, str, float, bytes, bytes], object], "
              "levels: collections.abc.Callable[[], list[int]]) -> None"),
      "Hands log records to `handle` (level, component, time, thread, message), on a thread of its own. "
      "`levels` returns the level of each component. Levels: -1 off, 0 error, 1 warn, "
      "2 info, 3 debug.");
  module.def("log", &log_from_python, "level"_a, "component"_a, "message"_a,
             "Logs a message (UTF-8) like the library itself: `logging` gets it in the thread that delivers "
             "records, "
             "so that the caller waits for none of its locks. Levels: 0 error, 1 warn, 2 info, 3 debug.");
  module.def("log_components", &components, "The components of TRUNKLINE_LOG, in the order of their levels.");
  module.def("log_levels_from_environment", &levels_from_environment,
             "What TRUNKLINE_LOG says, a level for each component; None where it is unset or wrong, which is "
             "reported on stderr.");
  module.def(
      "deliver_log",
      [] {
        adopt_log_levels();
        deliver_all();
      },
      "Adopts the levels that loggers have now, and returns once all records logged before are delivered.");
}

}  // namespace trunkline::python
