// Which sanitizer this program runs under, for tests of what one does not support. GCC defines macros, Clang
// has features.
#pragma once

#if defined(__has_feature)
#define TRUNKLINE_HAS_FEATURE(name) __has_feature(name)
#else
#define TRUNKLINE_HAS_FEATURE(name) 0
#endif

namespace trunkline::test {

#if defined(__SANITIZE_ADDRESS__) || TRUNKLINE_HAS_FEATURE(address_sanitizer)
inline constexpr bool kUnderAddressSanitizer = true;
#else
inline constexpr bool kUnderAddressSanitizer = false;
#endif

#if defined(__SANITIZE_THREAD__) || TRUNKLINE_HAS_FEATURE(thread_sanitizer)
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
