// The element types: how one is widened, scaled, combined and narrowed again. The meaning of every step, and so every
// bit, is that of the CPU engine: native/reduce/reduce.hpp.
//
// An element type has `Raw`, its bits in memory, and `Sum`, what is computed with. Between two ranks of a ring a
// partial result travels as Raw: suspend() and resume().
#pragma once

#include "layout.cuh"

namespace kvstore_hvd::gpu {

// A factor, rounded to float32 by the host: here the conversion would flush a denormal one.
struct Scale {
  double wide;
  float narrow;
};
KVHVD_INLINE Scale prescale_of(const Launch& launch) { return {launch.prescale, launch.prescale32}; }
KVHVD_INLINE Scale postscale_of(const Launch& launch) { return {launch.postscale, launch.postscale32}; }

// ---- Floats ----
// Comparisons are those of bits: a comparison of floats could be compiled to one that flushes denormals.

KVHVD_INLINE bool is_nan(float a) { return (bits_of(a) & 0x7fffffffU) > 0x7f800000U; }
KVHVD_INLINE bool is_nan(double a) { return (bits_of(a) & 0x7fffffffffffffffULL) > 0x7ff0000000000000ULL; }
// Which NaN an operation returns depends on the machine.
KVHVD_INLINE float canonical(float a) { return is_nan(a) ? float_of(0x7fc00000U) : a; }
KVHVD_INLINE double canonical(double a) { return is_nan(a) ? double_of(0x7ff8000000000000ULL) : a; }
// Numbers in the order of the floats, -0 before +0.
KVHVD_INLINE i32 rank_of(float a) {
  const u32 bits = bits_of(a);
  return static_cast<i32>(bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) & 0x7fffffffU));
}
KVHVD_INLINE i64 rank_of(double a) {
  const u64 bits = bits_of(a);
  return static_cast<i64>(bits ^ (static_cast<u64>(static_cast<i64>(bits) >> 63) & 0x7fffffffffffffffULL));
}

template <class Value>
struct FloatArithmetic {
  using Sum = Value;
  static constexpr u32 kInFlight = 1;
  static KVHVD_INLINE Sum plus(Sum a, Sum b) { return add(a, b); }
  static KVHVD_INLINE Sum times(Sum a, Sum b) { return multiply(a, b); }
  // IEEE 754-2019 minimum and maximum: a NaN input gives NaN.
  static KVHVD_INLINE Sum least(Sum a, Sum b) {
    if (is_nan(a)) return a;
    return is_nan(b) || rank_of(b) < rank_of(a) ? b : a;
  }
  static KVHVD_INLINE Sum greatest(Sum a, Sum b) {
    if (is_nan(a)) return a;
    return is_nan(b) || rank_of(b) > rank_of(a) ? b : a;
  }
  static KVHVD_INLINE float scaled(float a, const Scale& scale) { return multiply(a, scale.narrow); }
  static KVHVD_INLINE double scaled(double a, const Scale& scale) { return multiply(a, scale.wide); }
  static KVHVD_INLINE Sum prescaled(Sum a, const Scale& scale) { return scaled(a, scale); }
};

struct Float32 : FloatArithmetic<float> {
  using Raw = u32;
  static constexpr u32 kInFlight = 4;
  static KVHVD_INLINE Sum widen(Raw raw) { return float_of(raw); }
  static KVHVD_INLINE Raw narrow(Sum sum) { return bits_of(canonical(sum)); }
  static KVHVD_INLINE Sum resume(Raw raw) { return widen(raw); }
  static KVHVD_INLINE Raw suspend(Sum sum) { return bits_of(sum); }
};

struct Float64 : FloatArithmetic<double> {
  using Raw = u64;
  static KVHVD_INLINE Sum widen(Raw raw) { return double_of(raw); }
  static KVHVD_INLINE Raw narrow(Sum sum) { return bits_of(canonical(sum)); }
  static KVHVD_INLINE Sum resume(Raw raw) { return widen(raw); }
  static KVHVD_INLINE Raw suspend(Sum sum) { return bits_of(sum); }
};

struct Float16 : FloatArithmetic<float> {
  using Raw = u16;
  static constexpr u32 kInFlight = 2;
  static KVHVD_INLINE Sum widen(Raw raw) { return half_to_float(raw); }
  static KVHVD_INLINE Raw narrow(Sum sum) { return is_nan(sum) ? static_cast<u16>(0x7e00) : float_to_half(sum); }
  static KVHVD_INLINE Sum prescaled(Sum a, const Scale& scale) { return widen(narrow(scaled(a, scale))); }
  static KVHVD_INLINE Sum resume(Raw raw) { return widen(raw); }
  static KVHVD_INLINE Raw suspend(Sum sum) { return narrow(sum); }
};

struct BFloat16 : FloatArithmetic<float> {
  using Raw = u16;
  static constexpr u32 kInFlight = 2;
  static KVHVD_INLINE Sum widen(Raw raw) { return float_of(static_cast<u32>(raw) << 16); }
  // Adding just under half a unit of the last kept place, plus one if that place is odd, rounds to nearest even; a
  // carry out of the fraction is the right exponent, infinity included.
  static KVHVD_INLINE Raw narrow(Sum sum) {
    const u32 bits = bits_of(canonical(sum));
    return static_cast<u16>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
  }
  static KVHVD_INLINE Sum prescaled(Sum a, const Scale& scale) { return widen(narrow(scaled(a, scale))); }
  static KVHVD_INLINE Sum resume(Raw raw) { return widen(raw); }
  static KVHVD_INLINE Raw suspend(Sum sum) { return narrow(sum); }
};

KVHVD_INLINE float through_half(float a) { return half_to_float(Float16::narrow(a)); }

struct Float32AsHalf : FloatArithmetic<float> {
  using Raw = u32;
  static KVHVD_INLINE Sum widen(Raw raw) { return through_half(float_of(raw)); }
  static KVHVD_INLINE Sum prescaled(Sum a, const Scale& scale) { return through_half(scaled(a, scale)); }
  static KVHVD_INLINE Raw narrow(Sum sum) { return bits_of(through_half(sum)); }
  static KVHVD_INLINE Sum resume(Raw raw) { return float_of(raw); }
  static KVHVD_INLINE Raw suspend(Sum sum) { return bits_of(sum); }
};

struct Float64AsHalf : FloatArithmetic<float> {
  using Raw = u64;
  static KVHVD_INLINE Sum widen(Raw raw) { return through_half(to_float(double_of(raw))); }
  static KVHVD_INLINE Sum prescaled(Sum a, const Scale& scale) { return through_half(scaled(a, scale)); }
  static KVHVD_INLINE Raw narrow(Sum sum) { return bits_of(to_double(through_half(sum))); }
  static KVHVD_INLINE Sum resume(Raw raw) { return to_float(double_of(raw)); }
  static KVHVD_INLINE Raw suspend(Sum sum) { return bits_of(to_double(sum)); }
};

// ---- Integers ----

// `Bits` is the unsigned type of the same size: sums and products wrap around.
template <class Value, class Bits>
struct Integer {
  using Raw = Bits;
  using Sum = Value;
  static constexpr u32 kInFlight = 1;
  static KVHVD_INLINE Sum widen(Raw raw) { return static_cast<Sum>(raw); }
  static KVHVD_INLINE Raw narrow(Sum sum) { return static_cast<Raw>(sum); }
  static KVHVD_INLINE Sum resume(Raw raw) { return widen(raw); }
  static KVHVD_INLINE Raw suspend(Sum sum) { return narrow(sum); }
  static KVHVD_INLINE Sum plus(Sum a, Sum b) {
    return static_cast<Sum>(static_cast<Bits>(static_cast<u64>(a) + static_cast<u64>(b)));
  }
  static KVHVD_INLINE Sum times(Sum a, Sum b) {
    return static_cast<Sum>(static_cast<Bits>(static_cast<u64>(a) * static_cast<u64>(b)));
  }
  static KVHVD_INLINE Sum least(Sum a, Sum b) { return b < a ? b : a; }
  static KVHVD_INLINE Sum greatest(Sum a, Sum b) { return b > a ? b : a; }

  static KVHVD_INLINE Sum prescaled(Sum value, const Scale& scale) { return scaled(value, scale); }
  // Toward zero; the nearest value of the type where that is out of range, 0 for NaN.
  static KVHVD_INLINE Sum scaled(Sum value, const Scale& scale) {
    if (scale.wide == 1.0) return value;  // float64 does not hold every 64-bit integer
    constexpr int kBits = 8 * sizeof(Value);
    constexpr bool kSigned = static_cast<Value>(-1) < static_cast<Value>(0);
    constexpr Value kTop = static_cast<Value>(static_cast<Bits>(~Bits{0}) >> (kSigned ? 1 : 0));
    constexpr Value kBottom = kSigned ? static_cast<Value>(-kTop - 1) : static_cast<Value>(0);
    // The largest float64 that fits: for 64 bits it is below the largest value.
    constexpr double kLargest = kBits < 64 ? static_cast<double>(kTop) : 9223372036854774784.0;
    const double product = multiply(static_cast<double>(value), scale.wide);
    if (is_nan(product)) return 0;
    if (product > kLargest) return kTop;
    if (product < static_cast<double>(kBottom)) return kBottom;
    return static_cast<Sum>(product);
  }
};

using Int8 = Integer<i8, u8>;
using UInt8 = Integer<u8, u8>;
using Int32 = Integer<i32, u32>;
using Int64 = Integer<i64, u64>;

// ---- Vectors of elements ----

template <class E>
constexpr u32 kLanes = sizeof(Vector) / sizeof(typename E::Raw);

// The i-th element; i is known when the loop around it is unrolled, so that nothing but shifts is left.
template <class Raw>
KVHVD_INLINE Raw lane(const Vector& vector, u32 i) {
  if constexpr (sizeof(Raw) == 8) {
    return static_cast<Raw>(vector.words[2 * i]) | static_cast<Raw>(vector.words[2 * i + 1]) << 32;
  } else {
    constexpr u32 kInWord = 4 / sizeof(Raw);
    return static_cast<Raw>(vector.words[i / kInWord] >> (8 * sizeof(Raw) * (i % kInWord)));
  }
}
// Puts the i-th element into a vector whose elements from the i-th on are 0.
template <class Raw>
KVHVD_INLINE void put_lane(Vector& vector, u32 i, Raw raw) {
  if constexpr (sizeof(Raw) == 8) {
    vector.words[2 * i] = static_cast<u32>(raw);
    vector.words[2 * i + 1] = static_cast<u32>(raw >> 32);
  } else {
    constexpr u32 kInWord = 4 / sizeof(Raw);
    vector.words[i / kInWord] |= static_cast<u32>(raw) << (8 * sizeof(Raw) * (i % kInWord));
  }
}

// Blocks that are to fit on a multiprocessor at once: two leave a thread 64 registers, too few for sixteen elements.
template <class E>
constexpr u32 kResident = kLanes<E> == 16 ? 1 : 2;

// Partial results of the elements of one vector.
template <class E>
struct Sums {
  typename E::Sum of[kLanes<E>];

  KVHVD_INLINE void take(const Vector& input, const Scale& prescale) {
    KVHVD_UNROLL
    for (u32 i = 0; i < kLanes<E>; ++i) of[i] = E::prescaled(E::widen(lane<typename E::Raw>(input, i)), prescale);
  }
  KVHVD_INLINE void resume(const Vector& partial) {
    KVHVD_UNROLL
    for (u32 i = 0; i < kLanes<E>; ++i) of[i] = E::resume(lane<typename E::Raw>(partial, i));
  }
  KVHVD_INLINE Vector suspend() const {
    Vector partial = {};
    KVHVD_UNROLL
    for (u32 i = 0; i < kLanes<E>; ++i) put_lane(partial, i, E::suspend(of[i]));
    return partial;
  }
  KVHVD_INLINE Vector finish(const Scale& postscale) const {
    Vector result = {};
    KVHVD_UNROLL
    for (u32 i = 0; i < kLanes<E>; ++i) put_lane(result, i, E::narrow(E::scaled(of[i], postscale)));
    return result;
  }

  // this = this `op` other. With kSumOnly the operation is not looked at.
  template <bool kSumOnly>
  KVHVD_INLINE void combine(u32 op, const Sums& other) {
    if (kSumOnly || op == kSum || op == kAverage) {
      KVHVD_UNROLL
      for (u32 i = 0; i < kLanes<E>; ++i) of[i] = E::plus(of[i], other.of[i]);
    } else if (op == kMin) {
      KVHVD_UNROLL
      for (u32 i = 0; i < kLanes<E>; ++i) of[i] = E::least(of[i], other.of[i]);
    } else if (op == kMax) {
      KVHVD_UNROLL
      for (u32 i = 0; i < kLanes<E>; ++i) of[i] = E::greatest(of[i], other.of[i]);
    } else {
      KVHVD_UNROLL
      for (u32 i = 0; i < kLanes<E>; ++i) of[i] = E::times(of[i], other.of[i]);
    }
  }
};

}  // namespace kvstore_hvd::gpu
