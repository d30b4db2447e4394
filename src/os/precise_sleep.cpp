#include "os/precise_sleep.h"

#include <sys/prctl.h>

#include <ctime>

namespace trunkline::os {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

std::int64_t read_clock(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

}  // namespace

std::int64_t monotonic_ns() { return read_clock(CLOCK_MONOTONIC); }

std::int64_t thread_cpu_ns() { return read_clock(CLOCK_THREAD_CPUTIME_ID); }

void sleep_until_ns(std::int64_t deadline) {
  const timespec until{.tv_sec = deadline / kSecond, .tv_nsec = deadline % kSecond};
  ::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
}

FineTimers::FineTimers() : before_(::prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)) {
  ::prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
}

FineTimers::~FineTimers() {
  if (before_ > 0) ::prctl(PR_SET_TIMERSLACK, before_, 0, 0, 0);
}

}  // namespace trunkline::os
