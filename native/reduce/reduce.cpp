#include "reduce/reduce.hpp"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace kvstore_hvd {
namespace {

struct Target {
  const char* name;
  detail::Kernels (*kernels)();
  bool (*cpu_has_it)();
};

#if defined(__x86_64__)
struct Extensions {
  bool avx2 = false;
  bool avx512 = false;
};

// Asks the processor: __builtin_cpu_supports asks a table of the compiler's library, which is empty in that of zig.
Extensions ask_cpu() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  constexpr unsigned kBasic = bit_OSXSAVE | bit_AVX | bit_F16C;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kBasic) != kBasic) return {};
  unsigned kept = 0;  // the registers that the system keeps for each thread
  asm volatile("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
  constexpr unsigned kYmm = 0x06;
  constexpr unsigned kZmm = 0xe6;
  constexpr unsigned k512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
  if ((kept & kYmm) != kYmm || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (b & bit_AVX2) == 0) return {};
  return {true, (kept & kZmm) == kZmm && (b & k512) == k512};
}
bool cpu_has_avx2() { return ask_cpu().avx2; }
bool cpu_has_avx512() { return ask_cpu().avx512; }
#else
bool cpu_has_avx2() { return false; }
bool cpu_has_avx512() { return false; }
#endif

// Best first.
constexpr Target kTargets[] = {
    {"avx512", &detail::avx512_kernels, &cpu_has_avx512},
    {"avx2", &detail::avx2_kernels, &cpu_has_avx2},
    {"scalar", &detail::scalar_kernels, +[] { return true; }},
};

bool usable(const Target& target) { return target.cpu_has_it() && target.kernels().reduce != nullptr; }

const Target& best_target() {
  for (const Target& target : kTargets) {
    if (usable(target)) return target;
  }
  return kTargets[2];  // not reached: scalar is always usable
}

// Null until the first use. Relaxed is enough: a reader needs nothing but the pointer, its target is a constant, and
// two threads that both find null store the same.
std::atomic<const Target*> chosen{nullptr};

const Target& target_in_use() {
  const Target* target = chosen.load(std::memory_order_relaxed);
  if (target != nullptr) return *target;
  const Target* const best = &best_target();
  // Not a plain store, which could overwrite a concurrent set_simd_target.
  return chosen.compare_exchange_strong(target, best, std::memory_order_relaxed) ? *best : *target;
}

#if defined(__x86_64__)
using FloatControl = unsigned;
constexpr FloatControl kDefaultFloats = 0x1f80;  // all exceptions masked, to nearest, denormals kept
constexpr FloatControl kFloatFlags = 0x3f;       // exceptions seen so far: no setting
FloatControl float_control() { return _mm_getcsr(); }
void set_float_control(FloatControl value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
using FloatControl = std::uint64_t;
constexpr FloatControl kDefaultFloats = 0;  // as above
constexpr FloatControl kFloatFlags = 0;     // they have a register of their own
FloatControl float_control() {
  FloatControl value = 0;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void set_float_control(FloatControl value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
using FloatControl = int;
constexpr FloatControl kDefaultFloats = 0, kFloatFlags = 0;
FloatControl float_control() { return kDefaultFloats; }
void set_float_control(FloatControl) {}
#endif

// Libraries built with -ffast-math make threads flush denormals, and a caller may have changed the rounding mode: ranks
// would get different bits. Sets the default environment for the lifetime of the object.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() : before_(float_control()) {
    if (differs()) set_float_control(kDefaultFloats);
  }
  ~DefaultFloatEnvironment() {
    if (differs()) set_float_control(before_);
  }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  bool differs() const { return (before_ & ~kFloatFlags) != kDefaultFloats; }

  const FloatControl before_;
};

}  // namespace

void reduce(const Reduction& reduction, const void* const* inputs, int n_inputs, void* const* outputs, int n_outputs,
            std::size_t count) {
  if (n_inputs < 1 || n_outputs < 1 || count == 0) return;
  const bool as_half = reduction.as_half && can_be_half(reduction.dtype, reduction.op);
  if (n_inputs == 1 && reduction.prescale == 1.0 && reduction.postscale == 1.0 && !as_half) {
    for (int i = 0; i < n_outputs; ++i) {
      if (outputs[i] != inputs[0]) std::memcpy(outputs[i], inputs[0], count * size_of(reduction.dtype));
    }
    return;
  }
  const DefaultFloatEnvironment environment;
  target_in_use().kernels().reduce(reduction, inputs, n_inputs, outputs, n_outputs, count);
}

void narrow(DType to, const void* input, void* output, std::size_t count) {
  const DefaultFloatEnvironment environment;
  target_in_use().kernels().convert(to, true, static_cast<const char*>(input), static_cast<char*>(output), count);
}

void widen(DType from, const void* input, void* output, std::size_t count) {
  const DefaultFloatEnvironment environment;
  target_in_use().kernels().convert(from, false, static_cast<const char*>(input), static_cast<char*>(output), count);
}

void update(Rule rule, const Hyperparameters& how, const Parameter& parameter, std::size_t count) {
  target_in_use().kernels().update(rule, how, parameter, count);
}

const char* simd_target() { return target_in_use().name; }

bool set_simd_target(const std::string& target) {
  if (target == "auto") {
    chosen.store(&best_target(), std::memory_order_relaxed);
    return true;
  }
  for (const Target& candidate : kTargets) {
    if (target != candidate.name || !usable(candidate)) continue;
    chosen.store(&candidate, std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace kvstore_hvd
