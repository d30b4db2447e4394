#include "base/crc_fold.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trunkline {
namespace {

#if defined(__x86_64__)
// Below this the way around costs more than it saves.
constexpr std::size_t kLeastBytes = 8 * kFoldedBytes;
constexpr std::size_t kVectorBytes = 32;
constexpr std::size_t kVectors = kFoldedBytes / kVectorBytes;

template <bool kCopy>
__attribute__((target("avx2,pclmul,vpclmulqdq"))) void fold_vectors(const std::byte* data, std::size_t rounds,
                                                                    std::uint32_t state,
                                                                    const FoldConstants& constants,
                                                                    std::byte* folded, std::byte* target) {
  const __m256i k =
      _mm256_set_epi64x(static_cast<long long>(constants.high), static_cast<long long>(constants.low),
                        static_cast<long long>(constants.high), static_cast<long long>(constants.low));
  const auto* from = reinterpret_cast<const __m256i*>(data);
  auto* to = reinterpret_cast<__m256i*>(target);
  __m256i sums[kVectors];
  for (std::size_t i = 0; i < kVectors; ++i) {
    sums[i] = _mm256_loadu_si256(from + i);
    if constexpr (kCopy) _mm256_stream_si256(to + i, sums[i]);
  }
  sums[0] = _mm256_xor_si256(sums[0], _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, static_cast<int>(state)));
  for (std::size_t round = 1; round < rounds; ++round) {
    from += kVectors;
    to += kCopy ? kVectors : 0;
    for (std::size_t i = 0; i < kVectors; ++i) {
      const __m256i next = _mm256_loadu_si256(from + i);
      if constexpr (kCopy) _mm256_stream_si256(to + i, next);
      const __m256i low = _mm256_clmulepi64_epi128(sums[i], k, 0x00);
      const __m256i high = _mm256_clmulepi64_epi128(sums[i], k, 0x11);
      sums[i] = _mm256_xor_si256(_mm256_xor_si256(low, high), next);
    }
  }
  // Streaming stores are weakly ordered; whoever is told that the bytes are there must see them.
  if constexpr (kCopy) _mm_sfence();
  for (std::size_t i = 0; i < kVectors; ++i)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(folded + i * kVectorBytes), sums[i]);
}
#endif

// 128-byte rounds in `bytes`; 0 when they are few, or this processor cannot.
std::size_t rounds_of([[maybe_unused]] std::span<const std::byte> bytes) {
#if defined(__x86_64__)
  static const bool can = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
  if (can && bytes.size() >= kLeastBytes) return bytes.size() / kFoldedBytes;
#endif
  return 0;
}

}  // namespace

std::size_t fold(std::span<const std::byte> bytes, [[maybe_unused]] std::uint32_t state,
                 [[maybe_unused]] const FoldConstants& constants,
                 [[maybe_unused]] std::array<std::byte, kFoldedBytes>& folded) {
  const std::size_t rounds = rounds_of(bytes);
#if defined(__x86_64__)
  if (rounds != 0) fold_vectors<false>(bytes.data(), rounds, state, constants, folded.data(), nullptr);
#endif
  return rounds * kFoldedBytes;
}

std::size_t fold_and_copy(std::span<const std::byte> bytes, [[maybe_unused]] std::uint32_t state,
                          [[maybe_unused]] const FoldConstants& constants,
                          [[maybe_unused]] std::array<std::byte, kFoldedBytes>& folded,
                          [[maybe_unused]] std::byte* target) {
  const std::size_t rounds = rounds_of(bytes);
#if defined(__x86_64__)
  if (rounds != 0) fold_vectors<true>(bytes.data(), rounds, state, constants, folded.data(), target);
#endif
  return rounds * kFoldedBytes;
}

}  // namespace trunkline
