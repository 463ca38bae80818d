// The kernels by name, as the host finds them in a compiled module.
#pragma once

#include <dlfcn.h>

#include <string>

#include "kernels.cu"
#include "reduce/reduce.hpp"

namespace kvstore_hvd::gpu::tests {

using MeetingKernel = void (*)(const World*, Launch);
using CopyKernel = void (*)(Copy);

// nullptr: there is no such kernel.
template <class Kernel>
Kernel kernel_named(const std::string& name) {
  return reinterpret_cast<Kernel>(dlsym(RTLD_DEFAULT, name.c_str()));
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
