// The reduction kernels against the reference: every dtype, op, count, offset, aliasing and target. Elements are
// independent of each other, so that the reference of the longest arrays serves all of them.
#include <string>
#include <vector>

#include "check.hpp"
#include "reduce_cases.hpp"
#include "reduce_reference.hpp"

namespace kvstore_hvd::reduce_tests {
namespace {

constexpr std::size_t kCounts[] = {0, 1, 7, 15, 16, 17, 63, 64, 65, 1000, 4099};

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
}  // namespace kvstore_hvd::reduce_tests

int main(int argc, char** argv) { return testing::run(argc, argv); }
