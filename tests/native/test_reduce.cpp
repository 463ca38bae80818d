// The reduction kernels against a reference that is written for clarity: one element at a time, conversions by
// arithmetic in float64. Elements are independent of each other, so that the reference of the longest arrays serves all
// counts, offsets, aliasings and targets.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "kvstore_hvd/reduce.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using namespace kvstore_hvd;
using Bytes = std::vector<unsigned char>;
using testing::check;

// ---- Reference ----

struct Half {
  std::uint16_t bits;
};
struct Brain {
  std::uint16_t bits;
};

// The value of a float with these widths of exponent and fraction.
double decode(unsigned bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const unsigned fraction = bits & ((1U << fraction_bits) - 1);
  const double sign = (bits >> (exponent_bits + fraction_bits)) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + std::ldexp(1.0, fraction_bits), exponent - bias - fraction_bits);
}

// Rounds to nearest even; nearbyint does in the default environment.
std::uint16_t encode(double value, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const unsigned infinity = ((1U << exponent_bits) - 1) << fraction_bits;
  if (std::isnan(value)) return static_cast<std::uint16_t>(infinity | (1U << (fraction_bits - 1)));
  const unsigned sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (magnitude == 0.0) return static_cast<std::uint16_t>(sign);
  if (std::isinf(magnitude)) return static_cast<std::uint16_t>(sign | infinity);
  const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  // In units of the last place; a denormal's exponent field is one less than that of the smallest normal number, and
  // the leading one of a normal number adds one to its field.
  const auto units = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, fraction_bits - exponent)));
  const long long bits = (static_cast<long long>(exponent + bias - 1) << fraction_bits) + units;
  return static_cast<std::uint16_t>(sign | static_cast<unsigned>(std::min<long long>(bits, infinity)));
}

float widen(float value) { return value; }
double widen(double value) { return value; }
float widen(Half value) { return static_cast<float>(decode(value.bits, 5, 10)); }
float widen(Brain value) { return static_cast<float>(decode(value.bits, 8, 7)); }

void narrow(float value, float* to) { *to = std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : value; }
void narrow(double value, double* to) { *to = std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value; }
void narrow(float value, Half* to) { to->bits = encode(value, 5, 10); }
void narrow(float value, Brain* to) { to->bits = encode(value, 8, 7); }

template <typename F>
F combine_float(ReduceOp op, F a, F b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return a + b;
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      break;
  }
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<F>::quiet_NaN();
  const bool a_is_less = a < b || (a == b && std::signbit(a));
  return a_is_less == (op == ReduceOp::kMin) ? a : b;
}

template <typename T>
T combine_integer(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return a < b ? b : a;
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
    case ReduceOp::kProduct:
      return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
  return 0;
}

template <typename T>
T scale_integer(T value, double scale) {
  if (scale == 1.0) return value;
  const double product = static_cast<double>(value) * scale;
  if (std::isnan(product)) return 0;
  if (product <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (product >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(std::trunc(product));
}

template <typename T>
Bytes expected(const Reduction& reduction, const std::vector<Bytes>& inputs) {
  const auto element = [&](const Bytes& input, std::size_t i) {
    T value;
    std::memcpy(&value, input.data() + i * sizeof(T), sizeof(T));
    return value;
  };
  // The one case in which nothing is computed.
  if (inputs.size() == 1 && reduction.prescale == 1.0 && reduction.postscale == 1.0) return inputs[0];
  Bytes result(inputs[0].size());
  for (std::size_t i = 0; i < result.size() / sizeof(T); ++i) {
    T rounded;
    if constexpr (std::is_integral_v<T>) {
      T value = scale_integer(element(inputs[0], i), reduction.prescale);
      for (std::size_t r = 1; r < inputs.size(); ++r) {
        value = combine_integer(reduction.op, value, scale_integer(element(inputs[r], i), reduction.prescale));
      }
      rounded = scale_integer(value, reduction.postscale);
    } else {
      auto value = widen(element(inputs[0], i));
      using F = decltype(value);
      value *= static_cast<F>(reduction.prescale);
      for (std::size_t r = 1; r < inputs.size(); ++r) {
        const F next = widen(element(inputs[r], i)) * static_cast<F>(reduction.prescale);
        value = combine_float(reduction.op, value, next);
      }
      narrow(value * static_cast<F>(reduction.postscale), &rounded);
    }
    std::memcpy(result.data() + i * sizeof(T), &rounded, sizeof(T));
  }
  return result;
}

template <typename T>
Bytes expected_as_half(Reduction reduction, const std::vector<Bytes>& inputs);

Bytes expected(const Reduction& reduction, const std::vector<Bytes>& inputs) {
  const bool as_half = reduction.as_half && (reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage);
  if (as_half && reduction.dtype == DType::kFloat32) return expected_as_half<float>(reduction, inputs);
  if (as_half && reduction.dtype == DType::kFloat64) return expected_as_half<double>(reduction, inputs);
  switch (reduction.dtype) {
    case DType::kFloat16:
      return expected<Half>(reduction, inputs);
    case DType::kBFloat16:
      return expected<Brain>(reduction, inputs);
    case DType::kFloat32:
      return expected<float>(reduction, inputs);
    case DType::kFloat64:
      return expected<double>(reduction, inputs);
    case DType::kInt8:
      return expected<std::int8_t>(reduction, inputs);
    case DType::kUInt8:
      return expected<std::uint8_t>(reduction, inputs);
    case DType::kInt32:
      return expected<std::int32_t>(reduction, inputs);
    case DType::kInt64:
      return expected<std::int64_t>(reduction, inputs);
  }
  return {};
}

// The inputs cast to float16, reduced, and the result cast back.
template <typename T>
Bytes expected_as_half(Reduction reduction, const std::vector<Bytes>& inputs) {
  std::vector<Bytes> halves;
  for (const Bytes& input : inputs) {
    halves.emplace_back(input.size() / sizeof(T) * sizeof(Half));
    for (std::size_t i = 0; i < input.size() / sizeof(T); ++i) {
      T value;
      std::memcpy(&value, input.data() + i * sizeof(T), sizeof(T));
      const std::uint16_t half = encode(static_cast<float>(value), 5, 10);
      std::memcpy(halves.back().data() + i * sizeof(Half), &half, sizeof(Half));
    }
  }
  reduction.dtype = DType::kFloat16;
  const Bytes sums = expected(reduction, halves);
  Bytes result(inputs[0].size());
  for (std::size_t i = 0; i < result.size() / sizeof(T); ++i) {
    Half half;
    std::memcpy(&half, sums.data() + i * sizeof(Half), sizeof(Half));
    const T value = widen(half);
    std::memcpy(result.data() + i * sizeof(T), &value, sizeof(T));
  }
  return result;
}

// ---- Data ----

// Floats: one in four is any bit pattern (NaNs with payloads, denormals), one in eight a zero or an infinity, the
// others are of ordinary size and often cancel. Integers: any bit pattern, every other one small.
Bytes random_array(DType dtype, std::size_t count, std::mt19937_64& random) {
  const std::size_t size = size_of(dtype);
  Bytes bytes(count * size);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t bits = random();
    const std::uint64_t kind = random() % 8;
    const double ordinary = std::ldexp(static_cast<double>(static_cast<std::int64_t>(random())), -62);
    const double zero_or_infinity = kind == 2 ? 0.0 : std::numeric_limits<double>::infinity();
    const bool special = kind == 2 || (kind == 3 && random() % 16 == 0);
    const double value = special ? (bits % 2 == 0 ? zero_or_infinity : -zero_or_infinity) : ordinary;
    const auto single = static_cast<float>(value);
    switch (dtype) {
      case DType::kFloat16:
        if (kind >= 2) bits = encode(value, 5, 10);
        break;
      case DType::kBFloat16:
        if (kind >= 2) bits = encode(single, 8, 7);
        break;
      case DType::kFloat32:
        if (kind >= 2) std::memcpy(&bits, &single, sizeof(single));
        break;
      case DType::kFloat64:
        if (kind >= 2) std::memcpy(&bits, &value, sizeof(value));
        break;
      case DType::kInt8:
      case DType::kUInt8:
      case DType::kInt32:
      case DType::kInt64:
        if (kind >= 4) bits = static_cast<std::uint64_t>(static_cast<std::int64_t>(bits % 15) - 7);
        break;
    }
    std::memcpy(bytes.data() + i * size, &bits, size);  // little endian, as every supported machine
  }
  return bytes;
}

std::vector<Bytes> random_arrays(DType dtype, int n, std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Bytes> arrays;
  for (int i = 0; i < n; ++i) arrays.push_back(random_array(dtype, count, random));
  return arrays;
}

// An array of its own allocation, `offset` bytes after an address aligned to 64, with nothing after its end: the
// address sanitizer sees one byte read too many, the guard in front catches a write before the start.
class Placed {
 public:
  Placed(const Bytes& source, std::size_t bytes, std::size_t offset)
      : offset_(offset), bytes_(bytes), memory_(static_cast<unsigned char*>(::operator new(offset + bytes, kAlign))) {
    std::memset(memory_.get(), 0xa5, offset);
    if (bytes != 0) std::memcpy(data(), source.data(), bytes);
  }
  unsigned char* data() const { return memory_.get() + offset_; }
  bool holds(const Bytes& content) const {
    for (std::size_t i = 0; i < offset_; ++i) {
      if (memory_.get()[i] != 0xa5) return false;
    }
    return bytes_ == 0 || std::memcmp(data(), content.data(), bytes_) == 0;
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(unsigned char* memory) const { ::operator delete(memory, kAlign); }
  };
  std::size_t offset_;
  std::size_t bytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

enum class Outputs { kOneNew, kFirstInput, kLastInput, kAllInputs, kTwoNewAndAnInput };
constexpr Outputs kOutputs[] = {Outputs::kOneNew, Outputs::kFirstInput, Outputs::kLastInput, Outputs::kAllInputs,
                                Outputs::kTwoNewAndAnInput};

const std::vector<std::string>& targets() {
  static const std::vector<std::string> available = [] {
    std::vector<std::string> names;
    for (const char* name : {"scalar", "avx2", "avx512"}) {
      if (set_simd_target(name)) names.push_back(name);
    }
    set_simd_target("auto");
    return names;
  }();
  return available;
}

std::string describe(const Reduction& reduction, std::size_t n_inputs, std::size_t count) {
  return std::string(simd_target()) + " " + name_of(reduction.op) + " of " + std::to_string(n_inputs) + " " +
         name_of(reduction.dtype) + (reduction.as_half ? " as half[" : "[") + std::to_string(count) + "] scaled by " +
         std::to_string(reduction.prescale) + ", " + std::to_string(reduction.postscale);
}

// Reduces the first `count` elements of `sources` and compares every output, and every input that is none.
void check_reduction(const Reduction& reduction, const std::vector<Bytes>& sources, const Bytes& result,
                     std::size_t count, std::size_t offset, Outputs where) {
  const std::size_t bytes = count * size_of(reduction.dtype);
  std::vector<Placed> inputs;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    inputs.emplace_back(sources[i], bytes, (offset + i * offset * size_of(reduction.dtype)) % 64);
  }
  const Bytes filler(bytes, 0x5a);
  std::vector<Placed> fresh;
  std::vector<void*> outputs;
  std::vector<bool> overwritten(sources.size(), false);
  const auto add_fresh = [&] {
    fresh.emplace_back(filler, bytes, offset);
    outputs.push_back(fresh.back().data());
  };
  const auto add_input = [&](std::size_t i) {
    overwritten[i] = true;
    outputs.push_back(inputs[i].data());
  };
  switch (where) {
    case Outputs::kOneNew:
      add_fresh();
      break;
    case Outputs::kFirstInput:
      add_input(0);
      break;
    case Outputs::kLastInput:
      add_input(inputs.size() - 1);
      break;
    case Outputs::kAllInputs:
      for (std::size_t i = 0; i < inputs.size(); ++i) add_input(i);
      break;
    case Outputs::kTwoNewAndAnInput:
      add_fresh();
      add_input(inputs.size() / 2);
      add_fresh();
      break;
  }
  std::vector<const void*> addresses;
  for (const Placed& input : inputs) addresses.push_back(input.data());
  reduce(reduction, addresses.data(), static_cast<int>(addresses.size()), outputs.data(),
         static_cast<int>(outputs.size()), count);

  const auto what = [&] {
    return describe(reduction, sources.size(), count) + ", offset " + std::to_string(offset) + ", outputs " +
           std::to_string(static_cast<int>(where));
  };
  for (const Placed& output : fresh) {
    if (!output.holds(result)) check(false, what() + ": a new output is wrong");
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].holds(overwritten[i] ? result : sources[i])) {
      check(false, what() + ": input " + std::to_string(i) + (overwritten[i] ? " got a wrong result" : " was changed"));
    }
  }
}

constexpr std::size_t kCounts[] = {0, 1, 7, 15, 16, 17, 63, 64, 65, 1000, 4099};
constexpr std::size_t kLongest = 4099;

void check_product_of_all(DType dtype, bool as_half = false) {
  struct Scales {
    double prescale;
    double postscale;
  };
  for (int op = 0; op < kReduceOps; ++op) {
    for (const int n_inputs : {1, 2, 3, 4, 5, 8, 17}) {
      const auto seed = static_cast<std::uint64_t>(1000 * op + n_inputs);
      const std::vector<Bytes> sources = random_arrays(dtype, n_inputs, kLongest, seed);
      for (const Scales scales : {Scales{1.0, 1.0}, Scales{1.0, 1.0 / 3.0}, Scales{-1.7, 1.0}, Scales{0.3, 7.1}}) {
        const Reduction reduction{dtype, static_cast<ReduceOp>(op), scales.prescale, scales.postscale, as_half};
        const Bytes result = expected(reduction, sources);
        for (const std::string& target : targets()) {
          set_simd_target(target);
          for (const std::size_t count : kCounts) {
            for (const Outputs where : kOutputs) {
              // Aligned to a cache line, and to no more than an element.
              check_reduction(reduction, sources, result, count, 0, where);
              check_reduction(reduction, sources, result, count, size_of(dtype), where);
            }
          }
        }
      }
    }
  }
  set_simd_target("auto");
}

const bool products_registered = [] {
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    const auto type = static_cast<DType>(dtype);
    testing::add(std::string("everything: ") + name_of(type), [type] { check_product_of_all(type); });
    testing::add(std::string("everything as half: ") + name_of(type), [type] { check_product_of_all(type, true); });
  }
  return true;
}();

const bool many_registered = testing::add("64 and 65 arrays", [] {
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    for (const int n_inputs : {64, 65}) {
      const Reduction reduction{static_cast<DType>(dtype), ReduceOp::kSum, 1.0, 0.5};
      const std::vector<Bytes> sources = random_arrays(reduction.dtype, n_inputs, kLongest, 1);
      const Bytes result = expected(reduction, sources);
      for (const std::string& target : targets()) {
        set_simd_target(target);
        check_reduction(reduction, sources, result, kLongest, 8, Outputs::kAllInputs);
        check_reduction(reduction, sources, result, kLongest, 8, Outputs::kOneNew);
      }
    }
  }
  set_simd_target("auto");
});

// ---- Conversions and special values ----

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
const bool environment_registered = testing::add("the caller's floating-point modes do not matter", [] {
  constexpr unsigned kFlushAndRoundUp = 0x8040 | 0x4000;
  constexpr unsigned kModes = 0xffc0;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    const Reduction reduction{dtype, ReduceOp::kSum, 1.0, 0.37};
    const std::vector<Bytes> sources = random_arrays(dtype, 3, kLongest, 5);
    const Bytes result = expected(reduction, sources);
    for (const std::string& target : targets()) {
      set_simd_target(target);
      const unsigned before = _mm_getcsr();
      _mm_setcsr(before | kFlushAndRoundUp);
      check_reduction(reduction, sources, result, kLongest, 0, Outputs::kAllInputs);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(before);
      check((after & kModes) == ((before | kFlushAndRoundUp) & kModes), "the caller's modes are restored");
    }
  }
  set_simd_target("auto");
});
#endif

// ---- Targets ----

const bool targets_registered = testing::add("targets are set by name", [] {
  check(set_simd_target("scalar"), "scalar is always there");
  check(std::string(simd_target()) == "scalar", "the target that was set is in use");
  check(!set_simd_target("avx1024"), "an unknown target is refused");
  check(!set_simd_target(""), "an empty name is refused");
  check(std::string(simd_target()) == "scalar", "a refused target changes nothing");
  check(set_simd_target("auto"), "auto chooses");
  check(std::string(simd_target()) == targets().back(), "auto chooses the best");
});

}  // namespace

int main(int argc, char** argv) { return testing::run(argc, argv); }
