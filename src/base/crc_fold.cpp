#include "base/crc_fold.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trunkline {
namespace {

#if defined(__x86_64__)
// Below this, the setup costs more than folding saves.
constexpr std::size_t kMinBytes = 8 * kFoldedBytes;

template <bool kCopy>
__attribute__((target("avx2,pclmul,vpclmulqdq"))) void fold_256(const std::byte* data, std::size_t rounds,
                                                                std::uint32_t state,
                                                                const FoldConstants& constants,
                                                                std::byte* folded, std::byte* target) {
  constexpr std::size_t kVectors = kFoldedBytes / sizeof(__m256i);
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
  // Streaming stores are weakly ordered; a thread that learns that the bytes were written must see them.
  if constexpr (kCopy) _mm_sfence();
  for (std::size_t i = 0; i < kVectors; ++i)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(folded) + i, sums[i]);
}

// The hardware prefetcher does not keep up. Prefetching past the end is harmless.
constexpr std::ptrdiff_t kAheadBytes = 8192;
constexpr int kXorOfThree = 0x96;

template <bool kCopy>
__attribute__((target("avx512f,pclmul,vpclmulqdq"))) void fold_512(const std::byte* data, std::size_t rounds,
                                                                   std::uint32_t state,
                                                                   const FoldConstants& constants,
                                                                   std::byte* folded, std::byte* target) {
  constexpr std::size_t kVectors = kFoldedBytes / sizeof(__m512i);
  const __m512i k =
      _mm512_set4_epi64(static_cast<long long>(constants.high), static_cast<long long>(constants.low),
                        static_cast<long long>(constants.high), static_cast<long long>(constants.low));
  const auto* from = reinterpret_cast<const __m512i*>(data);
  auto* to = reinterpret_cast<__m512i*>(target);
  __m512i sums[kVectors];
  for (std::size_t i = 0; i < kVectors; ++i) {
    sums[i] = _mm512_loadu_si512(from + i);
    if constexpr (kCopy) _mm512_stream_si512(to + i, sums[i]);
  }
  sums[0] = _mm512_xor_si512(sums[0], _mm512_maskz_set1_epi32(1, static_cast<int>(state)));
  for (std::size_t round = 1; round < rounds; ++round) {
    from += kVectors;
    to += kCopy ? kVectors : 0;
    for (std::size_t i = 0; i < kVectors; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(from + i) + kAheadBytes, _MM_HINT_T0);
      const __m512i next = _mm512_loadu_si512(from + i);
      if constexpr (kCopy) _mm512_stream_si512(to + i, next);
      const __m512i low = _mm512_clmulepi64_epi128(sums[i], k, 0x00);
      const __m512i high = _mm512_clmulepi64_epi128(sums[i], k, 0x11);
      sums[i] = _mm512_ternarylogic_epi64(low, high, next, kXorOfThree);
    }
  }
  if constexpr (kCopy) _mm_sfence();  // as above
  for (std::size_t i = 0; i < kVectors; ++i)
    _mm512_storeu_si512(reinterpret_cast<__m512i*>(folded) + i, sums[i]);
}

template <bool kCopy>
std::size_t fold_with(FoldWidth width, std::span<const std::byte> bytes, std::uint32_t state,
                      const FoldConstants& constants, std::byte* folded, std::byte* target) {
  if (width == FoldWidth::none || bytes.size() < kMinBytes) return 0;
  const std::size_t rounds = bytes.size() / kFoldedBytes;
  const auto fold = width == FoldWidth::bits512 ? fold_512<kCopy> : fold_256<kCopy>;
  fold(bytes.data(), rounds, state, constants, folded, target);
  return rounds * kFoldedBytes;
}
#else
template <bool kCopy>
std::size_t fold_with(FoldWidth /*width*/, std::span<const std::byte> /*bytes*/, std::uint32_t /*state*/,
                      const FoldConstants& /*constants*/, std::byte* /*folded*/, std::byte* /*target*/) {
  return 0;
}
#endif

FoldWidth find_widest_fold() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("vpclmulqdq") != 0) {
    if (__builtin_cpu_supports("avx512f") != 0) return FoldWidth::bits512;
    if (__builtin_cpu_supports("avx2") != 0) return FoldWidth::bits256;
  }
#endif
  return FoldWidth::none;
}

}  // namespace

FoldWidth widest_fold() {
  static const FoldWidth widest = find_widest_fold();
  return widest;
}

std::size_t fold(std::span<const std::byte> bytes, std::uint32_t state, const FoldConstants& constants,
                 std::array<std::byte, kFoldedBytes>& folded, FoldWidth width) {
  return fold_with<false>(width, bytes, state, constants, folded.data(), nullptr);
}

std::size_t fold_and_copy(std::span<const std::byte> bytes, std::uint32_t state,
                          const FoldConstants& constants, std::array<std::byte, kFoldedBytes>& folded,
                          std::byte* target, FoldWidth width) {
  return fold_with<true>(width, bytes, state, constants, folded.data(), target);
}

}  // namespace trunkline
