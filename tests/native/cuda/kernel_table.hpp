// The kernels by name, as the host finds them in a compiled module.
#pragma once

#include <map>
#include <string>

#include "kernels.cu"
#include "reduce/reduce.hpp"

namespace kvstore_hvd::gpu::tests {

using MeetingKernel = void (*)(const World*, Launch);
using CopyKernel = void (*)(Copy);

#define KVHVD_ENTRY(name) {#name, &name}
#define KVHVD_ENTRIES(dtype, suffix)                                                      \
  KVHVD_ENTRY(kvhvd_oneshot_##dtype##suffix), KVHVD_ENTRY(kvhvd_twoshot_##dtype##suffix), \
      KVHVD_ENTRY(kvhvd_ring_##dtype##suffix)
#define KVHVD_FAST_ENTRIES(dtype)                                                                       \
  KVHVD_ENTRIES(dtype, _sum), KVHVD_ENTRIES(dtype, _other), KVHVD_ENTRY(kvhvd_twoshot_##dtype##_sum_2), \
      KVHVD_ENTRY(kvhvd_twoshot_##dtype##_sum_4), KVHVD_ENTRY(kvhvd_twoshot_##dtype##_sum_8)

inline const std::map<std::string, MeetingKernel>& meeting_kernels() {
  static const std::map<std::string, MeetingKernel> all = {
      KVHVD_ENTRY(kvhvd_exchange),
#if !defined(KVHVD_ONLY) || KVHVD_ONLY == 2
      KVHVD_FAST_ENTRIES(float32), KVHVD_ENTRIES(float32, _as_half),
#endif
#ifndef KVHVD_ONLY
      KVHVD_FAST_ENTRIES(float16), KVHVD_FAST_ENTRIES(bfloat16),
      KVHVD_ENTRIES(float64, ),    KVHVD_ENTRIES(float64, _as_half),
      KVHVD_ENTRIES(int8, ),       KVHVD_ENTRIES(uint8, ),
      KVHVD_ENTRIES(int32, ),      KVHVD_ENTRIES(int64, ),
#endif
  };
  return all;
}

inline const std::map<std::string, CopyKernel>& copy_kernels() {
  static const std::map<std::string, CopyKernel> all = {
      KVHVD_ENTRY(kvhvd_copy),
#if !defined(KVHVD_ONLY) || KVHVD_ONLY == 2
      KVHVD_ENTRY(kvhvd_copy_float32_float32),
      KVHVD_ENTRY(kvhvd_copy_float32_float16),
      KVHVD_ENTRY(kvhvd_copy_float32_bfloat16),
#endif
#ifndef KVHVD_ONLY
      KVHVD_ENTRY(kvhvd_copy_float16_float16),
      KVHVD_ENTRY(kvhvd_copy_float16_float32),
      KVHVD_ENTRY(kvhvd_copy_float16_float64),
      KVHVD_ENTRY(kvhvd_copy_bfloat16_bfloat16),
      KVHVD_ENTRY(kvhvd_copy_bfloat16_float32),
      KVHVD_ENTRY(kvhvd_copy_float64_float64),
      KVHVD_ENTRY(kvhvd_copy_float64_float16),
      KVHVD_ENTRY(kvhvd_copy_int8_int8),
      KVHVD_ENTRY(kvhvd_copy_uint8_uint8),
      KVHVD_ENTRY(kvhvd_copy_int32_int32),
      KVHVD_ENTRY(kvhvd_copy_int64_int64),
#endif
  };
  return all;
}

// As allreduce_kernel() of kvstore_hvd/gpu/kernels.py.
inline std::string allreduce_name(const std::string& algorithm, const Reduction& reduction, u32 ranks) {
  const std::string name = "kvhvd_" + algorithm + "_" + name_of(reduction.dtype);
  const bool summed = reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage;
  if (reduction.as_half && can_be_half(reduction.dtype, reduction.op)) return name + "_as_half";
  const bool fast =
      reduction.dtype == DType::kFloat16 || reduction.dtype == DType::kBFloat16 || reduction.dtype == DType::kFloat32;
  if (!fast) return name;
  if (!summed) return name + "_other";
  const bool unrolled = algorithm == "twoshot" && (ranks == 2 || ranks == 4 || ranks == 8);
  return name + "_sum" + (unrolled ? "_" + std::to_string(ranks) : "");
}

}  // namespace kvstore_hvd::gpu::tests
