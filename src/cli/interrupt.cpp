#include "cli/interrupt.h"

#include <atomic>
#include <csignal>
#include <initializer_list>

namespace trunkline::cli {
namespace {

std::atomic<int> caught_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may only touch lock-free atomics");

extern "C" void remember_signal(int signal) { caught_signal.store(signal); }

}  // namespace

void catch_interrupts() {
  struct sigaction action{};
  action.sa_handler = remember_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction inherited{};
    sigaction(signal, nullptr, &inherited);
    if (inherited.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);  // nohup stays in effect
  }
  std::signal(SIGPIPE, SIG_IGN);
}

bool interrupted() { return caught_signal.load() != 0; }

void end_by_caught_signal() {
  const int signal = caught_signal.load();
  if (signal == 0) return;
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace trunkline::cli
