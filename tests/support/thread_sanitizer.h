// Whether this program runs under the thread sanitizer, for tests of what it does not support.
#pragma once

namespace trunkline::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderThreadSanitizer = true;
#else
inline constexpr bool kUnderThreadSanitizer = false;
#endif

}  // namespace trunkline::test
