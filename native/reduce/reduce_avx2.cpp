// Compiled with -mavx2 -mf16c; without them (or for another architecture) the build has no such kernel.
#include "reduce/reduce.hpp"

#if defined(__AVX2__) && defined(__F16C__)

#include <immintrin.h>

#include "reduce/reduce_impl.hpp"
#include "reduce/update_impl.hpp"

namespace kvstore_hvd::detail {
namespace {

struct Avx2 : CopiedTails {
  static constexpr int kVectorBytes = 32;
  using F = Floats<kVectorBytes>;
  using H = Halves<kVectorBytes>;
  using W = Words<kVectorBytes>;

  static F widen_half(H half) { return bit_cast<F>(_mm256_cvtph_ps(bit_cast<__m128i>(half))); }
  static H narrow_half(F value) {
    return bit_cast<H>(_mm256_cvtps_ph(bit_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
  }
  static Floats<16> through_half(Floats<16> value) {
    return bit_cast<Floats<16>>(_mm_cvtph_ps(_mm_cvtps_ph(bit_cast<__m128>(value), _MM_FROUND_TO_NEAREST_INT)));
  }
  static W words_of(H halves) { return bit_cast<W>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(halves))); }
  static H low_halves(W words) {
    const auto all = bit_cast<__m256i>(words);
    return bit_cast<H>(_mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
  }
};

}  // namespace

Kernels avx2_kernels() { return {&reduce_with<Avx2>, &convert_with<Avx2>, &update_with<>}; }
#else
namespace kvstore_hvd::detail {

Kernels avx2_kernels() { return {}; }
#endif

}  // namespace kvstore_hvd::detail
