// The reduction kernels against the reference: every dtype, op, count, offset, aliasing and target; and values that are
// easily got wrong: every 16-bit pattern, every rounding, zeros, infinities, NaNs, overflows of integers, and
// floating-point modes of the caller. Elements are independent of each other, so that the reference of the longest
// arrays serves all of them.
#include <initializer_list>

#include "reduce_cases.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvstore_hvd::reduce_tests {
namespace {

constexpr std::pair<double, double> kScales[] = {{1.0, 1.0}, {1.0, 1.0 / 3.0}, {-1.7, 1.0}, {0.3, 7.1}};
constexpr std::size_t kCounts[] = {0, 1, 7, 15, 16, 17, 63, 64, 65, 1000, 4099};

void check_product_of_all(DType dtype, bool as_half = false) {
  for (int op = 0; op < kReduceOps; ++op) {
    for (const std::size_t n : {1, 2, 3, 4, 5, 8, 17}) {
      const std::vector<Bytes> sources = random_arrays(dtype, static_cast<int>(n), kLongest, 1000U * op + n);
      const std::vector<Outputs> places{{kNew}, {0}, {n - 1}, all_inputs(n), {kNew, n / 2, kNew}};
      for (const std::pair<double, double>& scales : kScales) {
        const Reduction reduction{dtype, static_cast<ReduceOp>(op), scales.first, scales.second, as_half};
        const Bytes result = expected(reduction, sources);
        on_each_target([&] {
          for (const std::size_t count : kCounts) {
            for (const Outputs& where : places) {
              // Aligned to a cache line, and to no more than an element.
              check_reduction(reduction, sources, result, count, 0, where);
              check_reduction(reduction, sources, result, count, size_of(dtype), where);
            }
          }
        });
      }
    }
  }
}

const bool products_registered = [] {
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    const auto type = static_cast<DType>(dtype);
    testing::add(std::string("everything: ") + name_of(type), [type] { check_product_of_all(type); });
  }
  for (const DType type : {DType::kFloat32, DType::kFloat64}) {
    testing::add(std::string("everything as half: ") + name_of(type), [type] { check_product_of_all(type, true); });
  }
  return true;
}();

const bool many_registered = testing::add("64 and 65 arrays; as half, which means nothing for other types", [] {
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    for (const std::size_t n : {64, 65}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
        const Reduction reduction{static_cast<DType>(dtype), op, 1.0, 0.5, n == 65};
        const std::vector<Bytes> sources = random_arrays(reduction.dtype, static_cast<int>(n), kLongest, 1);
        const Bytes result = expected(reduction, sources);
        on_each_target([&] {
          check_reduction(reduction, sources, result, kLongest, 8, all_inputs(n));
          check_reduction(reduction, sources, result, kLongest, 8, {kNew});
        });
      }
    }
  }
});

const bool targets_registered = testing::add("targets are set by name", [] {
  check(set_simd_target("scalar"), "scalar is always there");
  for (const char* unknown : {"avx1024", ""}) check(!set_simd_target(unknown), "an unknown target is refused");
  check(std::string(simd_target()) == "scalar", "a refused target changes nothing");
  check(set_simd_target("auto") && std::string(simd_target()) == targets().back(), "auto chooses the best");
});

// Every 16-bit pattern with every other operand of a list, so that every widening, and roundings at every magnitude,
// occur.
const bool patterns_registered = testing::add("every 16-bit pattern", [] {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Bytes all(65536 * 2);
    for (unsigned bits = 0; bits < 65536; ++bits) set_element(dtype, all, bits, bits);
    std::mt19937_64 random(7);
    const Bytes scrambled = random_array(dtype, 65536, random);
    for (const double prescale : {1.0, 1.0 / 3.0, 1e-3, 3e4}) {
      for (const Bytes& other : {Bytes(65536 * 2, 0), scrambled}) {
        const Reduction reduction{dtype, ReduceOp::kSum, prescale, 1.0};
        const Bytes result = expected(reduction, {all, other});
        on_each_target([&] { check_reduction(reduction, {all, other}, result, 65536, 0, {kNew}); });
      }
    }
  }
});

template <class Values>
Bytes bytes_of(const Values& values) {
  Bytes bytes(values.size() * sizeof(*values.begin()));
  std::memcpy(bytes.data(), &*values.begin(), bytes.size());
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
    on_each_target([&] { check_reduction(reduction, {all, other}, result, values.size(), 0, all_inputs(2)); });
  }
}

const bool roundings_registered = testing::add("as half: every rounding", [] {
  check_roundings<float>(DType::kFloat32);
  check_roundings<double>(DType::kFloat64);
});

// Every pattern, what lies half-way, and lengths that fill no vector.
const bool conversions_registered = testing::add("conversions to 16 bits and back", [] {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<std::uint16_t> halves, narrowed;
    std::vector<float> floats, widened;
    for (unsigned bits = 0; bits < 65536; ++bits) {
      const auto value = static_cast<float>(number_of(dtype, bits)),
                 next = static_cast<float>(number_of(dtype, bits + 1));
      halves.push_back(static_cast<std::uint16_t>(bits));
      for (const float each : {value, (value + next) / 2, std::nextafter(value, 1e9F)}) floats.push_back(each);
    }
    on_each_target([&] {
      for (const std::size_t count : {floats.size(), std::size_t{1}, std::size_t{37}}) {
        narrowed.assign(count + 1, 7);
        narrow(dtype, floats.data(), narrowed.data(), count);
        bool is_right = narrowed[count] == 7;
        for (std::size_t i = 0; i < count; ++i) {
          is_right = is_right && narrowed[i] == bits_of(dtype, static_cast<double>(floats[i]));
        }
        check(is_right, std::string("narrow by ") + simd_target());
      }
      for (const std::size_t count : {halves.size(), std::size_t{1}, std::size_t{37}}) {
        widened.assign(count + 1, 7);
        widen(dtype, &halves[halves.size() - count], widened.data(), count);
        bool is_right = widened[count] == 7;
        for (std::size_t i = 0; i < count; ++i) {
          const double value = number_of(dtype, halves[halves.size() - count + i]),
                       found = static_cast<double>(widened[i]);
          is_right = is_right && (std::isnan(value) ? std::isnan(found) : value == found);
        }
        check(is_right, std::string("widen by ") + simd_target());
      }
    });
  }
});

const bool nan_registered = testing::add("integers that are scaled by NaN are 0", [] {
  const Bytes three = bytes_of(std::initializer_list<std::int64_t>{3}), zero(three.size(), 0);
  check_reduction({DType::kInt64, ReduceOp::kSum, 1.0, std::nan("")}, {three, three}, zero, 1, 0, {kNew});
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
    on_each_target([&] {
      const FloatControl before = float_control();
      set_float_control(before | kFlushAndRoundUp);
      check_reduction(reduction, sources, result, kLongest, 0, all_inputs(3));
      const FloatControl after = float_control();
      set_float_control(before);
      check((after & kModes) == ((before | kFlushAndRoundUp) & kModes), "the caller's modes are restored");
    });
  }
});
#endif

}  // namespace
}  // namespace kvstore_hvd::reduce_tests
