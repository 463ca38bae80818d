// The element types of the reduction kernels as vectors: loading, storing, conversion, arithmetic.
//
// Private to the files that reduce_impl.hpp speaks of, and under its rules. An `Isa` supplies the vector width and the
// few steps that need instructions of their own; the rest is written with the compilers' vector types, which GCC and
// Clang lower for any architecture:
//
//   static constexpr int kVectorBytes;
//   static Floats<kVectorBytes> widen_half(Halves<kVectorBytes>);       float16 bits to float32, exact
//   static Halves<kVectorBytes> narrow_half(Floats<kVectorBytes>);      to nearest even; a NaN is the canonical one
//   static Floats<kVectorBytes / 2> through_half(Floats<kVectorBytes / 2>);              narrowed and widened again
//   static Words<kVectorBytes> words_of(Halves<kVectorBytes>);          zero-extended
//   static Halves<kVectorBytes> low_halves(Words<kVectorBytes>);        of words below 65536
//   template <typename Raw> static Raw load_partial(const char*, std::size_t bytes);      0 < bytes < sizeof(Raw)
//   template <typename Raw> static void store_partial(char*, Raw, std::size_t bytes);     writes no other byte
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace kvstore_hvd::detail {
namespace {

template <typename T, int kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <typename T, int kBytes>
using Vector = typename VectorOf<T, kBytes>::type;

template <int kBytes>
using Floats = Vector<float, kBytes>;
template <int kBytes>
using Words = Vector<std::uint32_t, kBytes>;
// As many 16-bit elements as there are 32-bit ones in kBytes.
template <int kBytes>
using Halves = Vector<std::uint16_t, kBytes / 2>;

template <typename To, typename From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename Raw>
Raw load(const char* from) {
  Raw raw;
  __builtin_memcpy(&raw, from, sizeof(Raw));
  return raw;
}

template <typename Raw>
void store(char* to, Raw raw) {
  __builtin_memcpy(to, &raw, sizeof(Raw));
}

// Partial loads and stores for instruction sets without masks.
struct CopiedTails {
  template <typename Raw>
  static Raw load_partial(const char* from, std::size_t bytes) {
    static_assert(sizeof(Raw) <= 32);
    Raw raw = {};
    copy_few(reinterpret_cast<char*>(&raw), from, bytes);
    return raw;
  }
  template <typename Raw>
  static void store_partial(char* to, Raw raw, std::size_t bytes) {
    static_assert(sizeof(Raw) <= 32);
    copy_few(to, reinterpret_cast<const char*>(&raw), bytes);
  }

 private:
  // Copies 0 <= bytes < 32. Not inlined: it would be most of the code.
  __attribute__((noinline)) static void copy_few(char* to, const char* from, std::size_t bytes) {
    if ((bytes & 16) != 0) copy_step<16>(to, from);
    if ((bytes & 8) != 0) copy_step<8>(to, from);
    if ((bytes & 4) != 0) copy_step<4>(to, from);
    if ((bytes & 2) != 0) copy_step<2>(to, from);
    if ((bytes & 1) != 0) copy_step<1>(to, from);
  }

  template <int kBytes>
  static void copy_step(char*& to, const char*& from) {
    __builtin_memcpy(to, from, kBytes);
    to += kBytes;
    from += kBytes;
  }
};

// ---- Element types: `Raw` is a vector as it lies in memory, `Reg` the vector that is computed with. ----

template <typename T, int kBytes>
struct FloatArithmetic {
  using Reg = Vector<T, kBytes>;
  using Bits = Vector<std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>, kBytes>;

  static Reg add(Reg a, Reg b) { return a + b; }
  static Reg multiply(Reg a, Reg b) { return a * b; }
  // IEEE 754-2019 `minimum`. The two selects differ only where the operands are equal or unordered: there OR makes -0
  // of zeros of either sign, and keeps a NaN a NaN.
  static Reg minimum(Reg a, Reg b) {
    const Reg first = a < b ? a : b;
    const Reg second = b < a ? b : a;
    return bit_cast<Reg>(bit_cast<Bits>(first) | bit_cast<Bits>(second));
  }
  static Reg maximum(Reg a, Reg b) { return -minimum(-a, -b); }
  static Reg scaled(Reg a, double scale) { return a * static_cast<T>(scale); }
  static Reg prescaled(Reg a, double scale) { return scaled(a, scale); }

 protected:
  // Which NaN an operation returns depends on the operand order that the compiler picked and on the architecture.
  static Reg canonical(Reg a) {
    constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();
    return a == a ? a : Reg{} + kNaN;
  }
};

template <class Isa>
struct Float32 : FloatArithmetic<float, Isa::kVectorBytes> {
  using Element = float;
  using Reg = Floats<Isa::kVectorBytes>;
  using Raw = Reg;
  static Reg widen(Raw raw) { return raw; }
  static Raw narrow(Reg reg) { return Float32::canonical(reg); }
};

template <class Isa>
struct Float64 : FloatArithmetic<double, Isa::kVectorBytes> {
  using Element = double;
  using Reg = Vector<double, Isa::kVectorBytes>;
  using Raw = Reg;
  static Reg widen(Raw raw) { return raw; }
  static Raw narrow(Reg reg) { return Float64::canonical(reg); }
};

template <class Isa>
struct Float16 : FloatArithmetic<float, Isa::kVectorBytes> {
  using Element = std::uint16_t;
  using Reg = Floats<Isa::kVectorBytes>;
  using Raw = Halves<Isa::kVectorBytes>;
  static Reg widen(Raw raw) { return Isa::widen_half(raw); }
  static Raw narrow(Reg reg) { return Isa::narrow_half(Float16::canonical(reg)); }
};

// float32 that is reduced as float16: rounded in registers, so that it costs no more memory traffic than float32.
template <class Isa>
struct Float32AsHalf : FloatArithmetic<float, Isa::kVectorBytes> {
  using Element = float;
  using Reg = Floats<Isa::kVectorBytes>;
  using Raw = Reg;
  static Reg widen(Raw raw) { return Isa::widen_half(Isa::narrow_half(raw)); }
  static Raw narrow(Reg reg) { return widen(Float32AsHalf::canonical(reg)); }
};

// The same of float64, computed in vectors of half the width.
template <class Isa>
struct Float64AsHalf : FloatArithmetic<float, Isa::kVectorBytes / 2> {
  using Element = double;
  using Reg = Floats<Isa::kVectorBytes / 2>;
  using Raw = Vector<double, Isa::kVectorBytes>;
  static Reg widen(Raw raw) { return Isa::through_half(__builtin_convertvector(raw, Reg)); }
  static Raw narrow(Reg reg) { return __builtin_convertvector(Isa::through_half(Float64AsHalf::canonical(reg)), Raw); }
};

template <class Isa>
struct BFloat16 : FloatArithmetic<float, Isa::kVectorBytes> {
  using Element = std::uint16_t;
  using Reg = Floats<Isa::kVectorBytes>;
  using Raw = Halves<Isa::kVectorBytes>;
  using Bits = Words<Isa::kVectorBytes>;
  static Reg widen(Raw raw) { return bit_cast<Reg>(Isa::words_of(raw) << 16); }
  // Adding just under half a unit of the last kept place, plus one if that place is odd, rounds to nearest even; a
  // carry out of the fraction is the right exponent, infinity included. The canonical NaN comes out as 0x7fc0.
  static Raw narrow(Reg reg) {
    const Bits bits = bit_cast<Bits>(BFloat16::canonical(reg));
    return Isa::low_halves((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

// A type of halves whose products with the first factor are rounded, as in memory, before they are combined.
template <class Type>
struct RoundedProducts : Type {
  static typename Type::Reg prescaled(typename Type::Reg a, double scale) {
    return Type::widen(Type::narrow(Type::scaled(a, scale)));
  }
};

// elements[i] = elements[i] * scale in float64, toward zero, the nearest representable value where that is out of
// range, 0 for NaN. Not inlined: its loop is long, and the kernels that use it are many.
template <typename T, int kCount>
__attribute__((noinline)) void scale_integers(T* elements, double scale) {
  constexpr T kMin = std::numeric_limits<T>::min();
  constexpr T kMax = std::numeric_limits<T>::max();
  constexpr double kLowest = static_cast<double>(kMin);
  // The largest float64 that fits: for int64 it is below the maximum.
  constexpr double kLargest = sizeof(T) < 8 ? static_cast<double>(kMax) : 0x1.fffffffffffffp62;
  for (int i = 0; i < kCount; ++i) {
    const double product = static_cast<double>(elements[i]) * scale;
    double clamped = product < kLowest ? kLowest : product;
    clamped = product > kLargest ? kLargest : clamped;
    clamped = product == product ? clamped : 0.0;
    const T truncated = static_cast<T>(clamped);
    elements[i] = product > kLargest ? kMax : truncated;
  }
}

template <class Isa, typename T>
struct Integer {
  using Element = T;
  using Reg = Vector<T, Isa::kVectorBytes>;
  using Raw = Reg;
  using Unsigned = Vector<std::make_unsigned_t<T>, Isa::kVectorBytes>;
  static Reg widen(Raw raw) { return raw; }
  static Raw narrow(Reg reg) { return reg; }
  static Reg add(Reg a, Reg b) { return bit_cast<Reg>(bit_cast<Unsigned>(a) + bit_cast<Unsigned>(b)); }
  static Reg multiply(Reg a, Reg b) { return bit_cast<Reg>(bit_cast<Unsigned>(a) * bit_cast<Unsigned>(b)); }
  static Reg minimum(Reg a, Reg b) { return a < b ? a : b; }
  static Reg maximum(Reg a, Reg b) { return a > b ? a : b; }
  static Reg prescaled(Reg reg, double scale) { return scaled(reg, scale); }
  static Reg scaled(Reg reg, double scale) {
    if (scale == 1.0) return reg;  // float64 does not hold every int64
    T elements[sizeof(Reg) / sizeof(T)];
    __builtin_memcpy(elements, &reg, sizeof(Reg));
    scale_integers<T, sizeof(Reg) / sizeof(T)>(elements, scale);
    __builtin_memcpy(&reg, elements, sizeof(Reg));
    return reg;
  }
};

}  // namespace
}  // namespace kvstore_hvd::detail
