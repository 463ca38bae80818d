// The reduction kernels on values that are easily got wrong: every 16-bit pattern, every rounding, zeros, infinities,
// NaNs, overflows of integers, and floating-point modes of the caller.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "reduce_cases.hpp"
#include "reduce_reference.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvstore_hvd::reduce_tests {
namespace {

// Every 16-bit pattern with every other operand of a list, so that every widening, and roundings at every magnitude,
// occur.
const bool patterns_registered = testing::add("every 16-bit pattern", [] {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Bytes all(65536 * 2);
    for (unsigned bits = 0; bits < 65536; ++bits) {
      const auto element = static_cast<std::uint16_t>(bits);
      std::memcpy(all.data() + bits * 2, &element, 2);
    }
    std::mt19937_64 random(7);
    const Bytes scrambled = random_array(dtype, 65536, random);
    for (const double prescale : {1.0, 1.0 / 3.0, 1e-3, 3e4}) {
      for (const Bytes& other : {Bytes(65536 * 2, 0), scrambled}) {
        const Reduction reduction{dtype, ReduceOp::kSum, prescale, 1.0};
        const Bytes result = expected(reduction, {all, other});
        for (const std::string& target : targets()) {
          set_simd_target(target);
          check_reduction(reduction, {all, other}, result, 65536, 0, Outputs::kOneNew);
        }
      }
    }
  }
  set_simd_target("auto");
});

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Every float16, what lies half-way to the next, and the neighbours of both; as doubles also what only float32 rounds
// to half-way.
template <typename T>
void check_roundings(DType dtype) {
  std::vector<T> values;
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const auto value = static_cast<T>(decode(bits, 5, 10));
    const T tie = std::isinf(value) ? value : (value + static_cast<T>(decode(bits + 1, 5, 10))) / 2;
    for (const T exact : {value, tie}) {
      for (const T towards : {-1e9, 1e9}) values.push_back(std::nextafter(exact, towards));
      values.push_back(exact);
      values.push_back(exact * (1 + std::numeric_limits<float>::epsilon() / 4));
    }
  }
  for (const T most : {65519.996, 65520.0, -65519.996, -65520.0, 1e38}) values.push_back(most);
  const Bytes all = bytes_of(values);
  std::mt19937_64 random(11);
  const Reduction reduction{dtype, ReduceOp::kSum, 1.0, 1.0, true};
  for (const Bytes& other : {bytes_of(std::vector<T>(values.size(), 0)), random_array(dtype, values.size(), random)}) {
    const Bytes result = expected(reduction, {all, other});
    for (const std::string& target : targets()) {
      set_simd_target(target);
      check_reduction(reduction, {all, other}, result, values.size(), 0, Outputs::kAllInputs);
    }
  }
  set_simd_target("auto");
}

const bool roundings_registered = testing::add("as half: every rounding", [] {
  check_roundings<float>(DType::kFloat32);
  check_roundings<double>(DType::kFloat64);
});

// As widen() and narrow() of the reference: every pattern, what lies half-way, and lengths that fill no vector.
template <typename Half>
void check_conversions(DType dtype) {
  std::vector<std::uint16_t> halves, narrowed;
  std::vector<float> floats, widened;
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const float value = widen(Half{static_cast<std::uint16_t>(bits)});
    const float next = widen(Half{static_cast<std::uint16_t>(bits + 1)});
    halves.push_back(static_cast<std::uint16_t>(bits));
    for (const float each : {value, (value + next) / 2, std::nextafter(value, 1e9F)}) floats.push_back(each);
  }
  for (const std::string& target : targets()) {
    set_simd_target(target);
    for (const std::size_t count : {floats.size(), std::size_t{1}, std::size_t{37}}) {
      narrowed.assign(count + 1, 7);
      kvstore_hvd::narrow(dtype, floats.data(), narrowed.data(), count);
      bool is_right = narrowed[count] == 7;
      for (std::size_t i = 0; i < count; ++i) {
        Half half;
        narrow(floats[i], &half);
        is_right = is_right && half.bits == narrowed[i];
      }
      check(is_right, "narrow by " + target);
    }
    widened.assign(halves.size(), 0);
    kvstore_hvd::widen(dtype, halves.data(), widened.data(), halves.size());
    bool is_right = true;
    for (std::size_t i = 0; i < halves.size(); ++i) {
      const float value = widen(Half{halves[i]});
      is_right = is_right && (std::isnan(value) ? std::isnan(widened[i]) : value == widened[i]);
    }
    check(is_right, "widen by " + target);
  }
  set_simd_target("auto");
}

const bool conversions_registered = testing::add("conversions to 16 bits and back", [] {
  check_conversions<Half>(DType::kFloat16);
  check_conversions<Brain>(DType::kBFloat16);
});

template <typename T>
Bytes bytes_of(std::initializer_list<T> values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.begin(), bytes.size());
  return bytes;
}

template <typename T>
void check_written_out(const Reduction& reduction, const std::vector<Bytes>& inputs, std::initializer_list<T> result) {
  for (const std::string& target : targets()) {
    set_simd_target(target);
    check_reduction(reduction, inputs, bytes_of(result), result.size(), 0, Outputs::kAllInputs);
  }
  set_simd_target("auto");
}

const bool specials_registered = testing::add("special values, written out", [] {
  using Words = std::initializer_list<std::uint32_t>;
  using Halves = std::initializer_list<std::uint16_t>;
  const Reduction sum{DType::kFloat32, ReduceOp::kSum};
  // -0 + -0, -0 + 0, denormal + denormal, infinity - infinity, payload NaN + 1, signalling NaN + NaN.
  check_written_out(sum,
                    {bytes_of(Words{0x80000000, 0x80000000, 1, 0x7f800000, 0xffc12345, 0x7f800001}),
                     bytes_of(Words{0x80000000, 0x00000000, 2, 0xff800000, 0x3f800000, 0xffffffff})},
                    Words{0x80000000, 0x00000000, 3, 0x7fc00000, 0x7fc00000, 0x7fc00000});
  const std::vector<Bytes> zeros_and_nans = {bytes_of(Words{0x00000000, 0x80000000, 0x7fc00000, 0x3f800000}),
                                             bytes_of(Words{0x80000000, 0x00000000, 0x3f800000, 0x7fc00000})};
  check_written_out(Reduction{DType::kFloat32, ReduceOp::kMin}, zeros_and_nans,
                    Words{0x80000000, 0x80000000, 0x7fc00000, 0x7fc00000});
  check_written_out(Reduction{DType::kFloat32, ReduceOp::kMax}, zeros_and_nans,
                    Words{0x00000000, 0x00000000, 0x7fc00000, 0x7fc00000});
  // float16: 65504 + 16 is a tie that rounds to infinity, + 15.99 is not; 1 + 2^-11 a tie to even; 2^-24 + 2^-24.
  check_written_out(Reduction{DType::kFloat16, ReduceOp::kSum},
                    {bytes_of(Halves{0x7bff, 0x7bff, 0x3c00, 0x3c01, 0x0001, 0xfe01}),
                     bytes_of(Halves{0x4c00, 0x4bff, 0x1000, 0x1000, 0x0001, 0x0000})},
                    Halves{0x7c00, 0x7bff, 0x3c00, 0x3c02, 0x0002, 0x7e00});
  // One rounding only: 2048 + 1 + 1 is lost when every partial sum is rounded to float16.
  check_written_out(Reduction{DType::kFloat16, ReduceOp::kSum},
                    {bytes_of(Halves{0x6800}), bytes_of(Halves{0x3c00}), bytes_of(Halves{0x3c00})}, Halves{0x6801});
  check_written_out(Reduction{DType::kBFloat16, ReduceOp::kSum},
                    {bytes_of(Halves{0x3f80, 0x3f81, 0x7f7f, 0x7f80, 0x8000, 0x7f81}),
                     bytes_of(Halves{0x3b80, 0x3b80, 0x7f7f, 0xff80, 0x8000, 0x0000})},
                    Halves{0x3f80, 0x3f82, 0x7f80, 0x7fc0, 0x8000, 0x7fc0});
});

const bool integers_registered = testing::add("integers wrap, scaling saturates", [] {
  using Int8s = std::initializer_list<std::int8_t>;
  using Int64s = std::initializer_list<std::int64_t>;
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
  check_written_out(Reduction{DType::kInt8, ReduceOp::kSum},
                    {bytes_of(Int8s{127, -128, 5}), bytes_of(Int8s{1, -1, -7})}, Int8s{-128, 127, -2});
  check_written_out(Reduction{DType::kInt8, ReduceOp::kAverage, 1.0, 0.5},
                    {bytes_of(Int8s{3, -3, 100}), bytes_of(Int8s{0, 0, 2})}, Int8s{1, -1, 51});
  check_written_out(Reduction{DType::kInt8, ReduceOp::kSum, 100.0, 1.0},
                    {bytes_of(Int8s{2, -2, 1}), bytes_of(Int8s{0, 0, 0})}, Int8s{127, -128, 100});
  // 2^63 - 1 is not a float64: an unscaled side must not go through one.
  check_written_out(Reduction{DType::kInt64, ReduceOp::kMin, 1.0, 1.0},
                    {bytes_of(Int64s{kMax, kMax - 1}), bytes_of(Int64s{kMax, kMax})}, Int64s{kMax, kMax - 1});
  check_written_out(Reduction{DType::kInt64, ReduceOp::kSum, 1.0, 2.0},
                    {bytes_of(Int64s{kMax - 1, kMin, 4}), bytes_of(Int64s{0, 0, -1})}, Int64s{kMax, kMin, 6});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  check_written_out(Reduction{DType::kInt64, ReduceOp::kSum, 1.0, nan}, {bytes_of(Int64s{3}), bytes_of(Int64s{4})},
                    Int64s{0});
});

const bool bits_registered = testing::add("one unscaled input keeps its bits", [] {
  const Bytes nans = bytes_of(std::initializer_list<std::uint32_t>{0x7f800001, 0xffc12345, 0x80000000});
  check_reduction(Reduction{}, {nans}, nans, 3, 4, Outputs::kTwoNewAndAnInput);
});

#if defined(__x86_64__)
using FloatControl = unsigned;
constexpr FloatControl kFlushAndRoundUp = 0x8040 | 0x4000, kModes = 0xffc0;
FloatControl float_control() { return _mm_getcsr(); }
void set_float_control(FloatControl value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
using FloatControl = std::uint64_t;
constexpr FloatControl kFlushAndRoundUp = 0x1480000, kModes = 0x7c80000;
FloatControl float_control() {
  FloatControl value = 0;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void set_float_control(FloatControl value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#endif

#if defined(__x86_64__) || defined(__aarch64__)
const bool environment_registered = testing::add("the caller's floating-point modes do not matter", [] {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    const Reduction reduction{dtype, ReduceOp::kSum, 1.0, 0.37};
    const std::vector<Bytes> sources = random_arrays(dtype, 3, kLongest, 5);
    const Bytes result = expected(reduction, sources);
    for (const std::string& target : targets()) {
      set_simd_target(target);
      const FloatControl before = float_control();
      set_float_control(before | kFlushAndRoundUp);
      check_reduction(reduction, sources, result, kLongest, 0, Outputs::kAllInputs);
      const FloatControl after = float_control();
      set_float_control(before);
      check((after & kModes) == ((before | kFlushAndRoundUp) & kModes), "the caller's modes are restored");
    }
  }
  set_simd_target("auto");
});
#endif

}  // namespace
}  // namespace kvstore_hvd::reduce_tests

int main(int argc, char** argv) { return testing::run(argc, argv); }
