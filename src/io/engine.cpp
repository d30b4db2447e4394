#include "trunkline/engine.h"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "io/engine_core.h"
#include "io/explain.h"
#include "os/exit_timeout.h"
#include "os/fork_generation.h"

namespace trunkline {
namespace {

// The default engine of this process. Never destroyed: operations may outlive static destruction. An atexit
// handler finishes what is pending at exit.
struct DefaultEngine {
  std::mutex mutex;
  Engine engine;
  unsigned generation = 0;
};
DefaultEngine& default_slot() {
  static auto* slot = new DefaultEngine;  // NOLINT(cppcoreguidelines-owning-memory)
  return *slot;
}

// The lock must be free in a forked child, whatever the parent's other threads were doing.
void lock_before_fork() { default_slot().mutex.lock(); }
void unlock_after_fork() { default_slot().mutex.unlock(); }

void finish_at_exit() {
  Engine engine;
  {
    const std::scoped_lock lock(default_slot().mutex);
    if (default_slot().generation != os::fork_generation()) return;
    engine = default_slot().engine;
  }
  if (!engine.valid()) return;
  // The process must end even where a device hangs, but then not with an exit code of success. A device that
  // is merely slow gets as long as it takes.
  const std::chrono::milliseconds timeout = os::exit_timeout();
  os::StallTimer<std::uint64_t> timer(0, std::chrono::steady_clock::now());
  const auto goes_on = [&](std::uint64_t completed) {
    return timer.stalled_for(completed, std::chrono::steady_clock::now()) < timeout;
  };
  if (engine.core()->close_while(goes_on)) return;
  const std::string message = fmt::format(
      "trunkline: no progress for {} s: the process exits with operations in flight, whose writes may be "
      "incomplete; check whether the device responds (dmesg)\n",
      std::chrono::duration<double>(timeout).count());
  std::fputs(message.c_str(), stderr);
  std::fflush(nullptr);
  ::_exit(EXIT_FAILURE);
}

Result<Engine> create_default() {
  EngineOptions options;
  // NOLINTNEXTLINE(concurrency-mt-unsafe): a program that changes its environment beside us races with itself
  if (const char* name = std::getenv("TRUNKLINE_BACKEND"); name != nullptr && *name != '\0') {
    auto kind = parse_backend(name);
    if (!kind) {
      kind.error().message = "TRUNKLINE_BACKEND: " + kind.error().message;
      return std::unexpected(kind.error());
    }
    options.backend = *kind;
  }
  return Engine::create(options);
}

}  // namespace

Result<Engine> Engine::create(const EngineOptions& options) {
  auto core = EngineCore::create(options);
  if (!core) return std::unexpected(core.error());
  return Engine(std::move(*core));
}

Result<Engine> Engine::default_engine() {
  static const bool registered = [] {
    os::fork_generation();
    pthread_atfork(lock_before_fork, unlock_after_fork, unlock_after_fork);
    std::atexit(finish_at_exit);
    return true;
  }();
  (void)registered;
  DefaultEngine& slot = default_slot();
  const std::scoped_lock lock(slot.mutex);
  const unsigned generation = os::fork_generation();
  if (slot.engine.valid() && slot.generation == generation && slot.engine.core()->usable())
    return slot.engine;
  auto engine = create_default();
  if (!engine) return engine;
  slot.engine = *engine;
  slot.generation = generation;
  return slot.engine;
}

const EngineConfig& Engine::config() const { return core_->config(); }

std::vector<Future> Engine::submit(std::span<const Request> requests) const {
  return core_->submit(requests);
}

Result<Explanation> Engine::explain(const std::string& path) const { return io::explain(*core_, path); }

EngineStats Engine::stats() const { return core_->stats(); }

Result<Buffer> Engine::allocate(std::uint64_t bytes) const {
  return Buffer::allocate(bytes, core_->budget());
}

void Engine::close() const { core_->close(); }

}  // namespace trunkline
