// The kernel for every CPU: plain C++ without instructions beyond the architecture's baseline.
#include "reduce/reduce_impl.hpp"
#include "reduce/update_impl.hpp"

namespace kvstore_hvd::detail {
namespace {

struct Baseline : CopiedTails {
  // 16 bytes: SSE2 and NEON are baselines of x86-64 and AArch64.
  static constexpr int kVectorBytes = 16;
  using F = Floats<kVectorBytes>;
  using H = Halves<kVectorBytes>;
  using W = Words<kVectorBytes>;
  // Signed: SSE2 has no unsigned comparisons.
  using I = Vector<std::int32_t, kVectorBytes>;

  static W words_of(H halves) { return __builtin_convertvector(halves, W); }
  static H low_halves(W words) { return __builtin_convertvector(words, H); }

  static F widen_half(H half) {
    const I all = bit_cast<I>(words_of(half));
    const I sign = (all & 0x8000) << 16;
    const I magnitude = (all & 0x7fff) << 13;  // exponent and fraction in their places, the bias still that of float16
    constexpr int kBias = (127 - 15) << 23;
    constexpr int kOne = 1 << 23;  // one in the exponent
    // A denormal has no leading one: give it one as bits, take it away as a number.
    const F denormal = bit_cast<F>(magnitude + (kBias + kOne)) - bit_cast<F>(I{} + (kBias + kOne));
    const I finite = magnitude < kOne ? bit_cast<I>(denormal) : magnitude + kBias;
    return bit_cast<F>((magnitude < 31 * kOne ? finite : magnitude | 0x7f800000) | sign);
  }

  static H narrow_half(F value) {
    const I all = bit_cast<I>(value);
    const I sign = (all >> 16) & 0x8000;
    const I magnitude = all & 0x7fffffff;
    // To nearest even by integers, as for bfloat16; a carry into the exponent is right, infinity included.
    const I normal = (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Below 2^-14 the result counts units of 2^-24, the last place of 0.5: adding 0.5 rounds to them.
    const I denormal = bit_cast<I>(bit_cast<F>(magnitude) + 0.5F) - bit_cast<I>(F{} + 0.5F);
    I result = magnitude < (113 << 23) ? denormal : normal;
    result = magnitude >= (143 << 23) ? I{} + 0x7c00 : result;  // 2^16 and more
    result = magnitude > 0x7f800000 ? I{} + 0x7e00 : result;    // NaN
    return low_halves(bit_cast<W>(result | sign));
  }

  static Floats<8> through_half(Floats<8> value) {
    const F rounded = widen_half(narrow_half(F{value[0], value[1], 0, 0}));
    return Floats<8>{rounded[0], rounded[1]};
  }
};

}  // namespace

Kernels scalar_kernels() { return {&reduce_with<Baseline>, &convert_with<Baseline>, &update_with<>}; }

}  // namespace kvstore_hvd::detail
