// Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c; without them (or for another architecture) the build
// has no such kernel.
#include "reduce/reduce.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include <immintrin.h>

#include "reduce/reduce_impl.hpp"
#include "reduce/update_impl.hpp"

namespace kvstore_hvd::detail {
namespace {

struct Avx512 {
  static constexpr int kVectorBytes = 64;
  using F = Floats<kVectorBytes>;
  using H = Halves<kVectorBytes>;
  using W = Words<kVectorBytes>;

  // The forms without a mask make GCC 12 warn of a variable in its own header; these compile to the same.
  static F widen_half(H half) { return bit_cast<F>(_mm512_maskz_cvtph_ps(kAll, bit_cast<__m256i>(half))); }
  static H narrow_half(F value) {
    return bit_cast<H>(_mm512_maskz_cvtps_ph(kAll, bit_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
  }
  static Floats<32> through_half(Floats<32> value) {
    return bit_cast<Floats<32>>(_mm256_cvtph_ps(_mm256_cvtps_ph(bit_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT)));
  }
  static W words_of(H halves) { return bit_cast<W>(_mm512_maskz_cvtepu16_epi32(kAll, bit_cast<__m256i>(halves))); }
  static H low_halves(W words) { return bit_cast<H>(_mm512_maskz_cvtepi32_epi16(kAll, bit_cast<__m512i>(words))); }

  template <typename Raw>
  static Raw load_partial(const char* from, std::size_t bytes) {
    if constexpr (sizeof(Raw) == 64) return bit_cast<Raw>(_mm512_maskz_loadu_epi8(mask<__mmask64>(bytes), from));
    if constexpr (sizeof(Raw) == 32) return bit_cast<Raw>(_mm256_maskz_loadu_epi8(mask<__mmask32>(bytes), from));
  }
  template <typename Raw>
  static void store_partial(char* to, Raw raw, std::size_t bytes) {
    if constexpr (sizeof(Raw) == 64) _mm512_mask_storeu_epi8(to, mask<__mmask64>(bytes), bit_cast<__m512i>(raw));
    if constexpr (sizeof(Raw) == 32) _mm256_mask_storeu_epi8(to, mask<__mmask32>(bytes), bit_cast<__m256i>(raw));
  }

 private:
  static constexpr __mmask16 kAll = 0xffff;

  template <typename Mask>
  static Mask mask(std::size_t bytes) {
    return static_cast<Mask>((std::uint64_t{1} << bytes) - 1);
  }
};

}  // namespace

Kernels avx512_kernels() { return {&reduce_with<Avx512>, &convert_with<Avx512>, &update_with<>}; }
#else
namespace kvstore_hvd::detail {

Kernels avx512_kernels() { return {}; }
#endif

}  // namespace kvstore_hvd::detail
