// Whether this program runs under the thread sanitizer, for tests of what it does not support.
#pragma once

namespace trunkline::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderThreadSanitizer = true;
#else
inline constexpr bool kUnderThreadSanitizer = false;
#endif

// `count` rounds or bytes, and a quarter of them under the thread sanitizer, where each costs ten times as
// much: it looks for races, which are in every round, while the other builds check in all rounds that results
// are right.
template <class T>
constexpr T scaled(T count) {
  return kUnderThreadSanitizer ? count / 4 : count;
}

// From one position of a fault to the next, for tests that inject one at each position.
inline constexpr unsigned kPositionStep = kUnderThreadSanitizer ? 3 : 1;

}  // namespace trunkline::test
