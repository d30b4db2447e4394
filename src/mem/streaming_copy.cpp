#include "mem/streaming_copy.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trunkline {
namespace {

// Shorter copies stay in the cache: a caller that copies few bytes is about to read them.
constexpr std::uint64_t kStreamingBytes = 256 * 1024;

#if defined(__x86_64__)
constexpr std::uint64_t kVectorBytes = 32;
constexpr std::uint64_t kStrideBytes = 4 * kVectorBytes;

__attribute__((target("avx2"))) void copy_avx2(std::byte* target, const std::byte* source,
                                               std::uint64_t bytes) {
  const std::uint64_t misplaced = reinterpret_cast<std::uintptr_t>(target) % kVectorBytes;
  const std::uint64_t head = std::min(bytes, misplaced == 0 ? 0 : kVectorBytes - misplaced);
  std::memcpy(target, source, head);
  std::uint64_t at = head;
  for (; at + kStrideBytes <= bytes; at += kStrideBytes) {
    const auto* from = reinterpret_cast<const __m256i*>(source + at);
    auto* to = reinterpret_cast<__m256i*>(target + at);
    const __m256i first = _mm256_loadu_si256(from);
    const __m256i second = _mm256_loadu_si256(from + 1);
    const __m256i third = _mm256_loadu_si256(from + 2);
    const __m256i fourth = _mm256_loadu_si256(from + 3);
    _mm256_stream_si256(to, first);
    _mm256_stream_si256(to + 1, second);
    _mm256_stream_si256(to + 2, third);
    _mm256_stream_si256(to + 3, fourth);
  }
  // Streaming stores are weakly ordered; a thread that learns that the bytes were written must see them.
  _mm_sfence();
  std::memcpy(target + at, source + at, bytes - at);
}
#endif

}  // namespace

void streaming_copy(std::byte* target, const std::byte* source, std::uint64_t bytes) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (bytes >= kStreamingBytes && has_avx2) {
    copy_avx2(target, source, bytes);
    return;
  }
#endif
  std::memcpy(target, source, bytes);
}

}  // namespace trunkline
