// What a kernel asks of the machine it runs on. On a GPU: this file, without any header of CUDA, so that NVRTC needs
// none. With g++: tests/native/cuda/host/platform.hpp, where a CUDA thread is a fiber or a thread of the host.
//
// Data are read and written by load() and store(), which are weak accesses: their callers order them with the
// flags below. They are never marked read-only for the kernel (ld.global.nc): peers write while it runs.
#pragma once

#ifndef __CUDACC__
#include "host/platform.hpp"
#else

#define KVHVD_INLINE __device__ __forceinline__
#define KVHVD_UNROLL _Pragma("unroll")
#define KVHVD_ROLLED _Pragma("unroll 1")
// resident: how many blocks are to fit on a multiprocessor at once
#define KVHVD_KERNEL(resident) extern "C" __global__ void __launch_bounds__(512, resident)
#define KVHVD_BY_VALUE const __grid_constant__
#define KVHVD_SHARED(Type, name) __shared__ Type name

namespace kvstore_hvd::gpu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i32 = int;
using i64 = long long;

struct alignas(16) Vector {
  u32 words[4];
};

// Blocks take tensors tile by tile: four vectors for each thread.
constexpr u32 kTileBytes = 32768;
constexpr u32 kTileElements = 8192;

// ---- Where this thread stands ----

KVHVD_INLINE u32 thread() { return threadIdx.x; }
// Of a block: known here, so that the addresses of a thread's accesses differ by constants.
KVHVD_INLINE constexpr u32 threads() { return 512; }
KVHVD_INLINE u32 block() { return blockIdx.x; }
KVHVD_INLINE u32 blocks() { return gridDim.x; }
// Which of the ranks of this launch the block belongs to.
KVHVD_INLINE u32 player() { return blockIdx.y; }

// ---- Order ----

// All accesses of the block's threads before it come before all after it.
KVHVD_INLINE void block_sync() { __syncthreads(); }

KVHVD_INLINE u32 load_acquire(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
KVHVD_INLINE u32 load_relaxed(const u32* from) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
KVHVD_INLINE void store_release(u32* to, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
KVHVD_INLINE void store_relaxed(u32* to, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// Returns the value before.
KVHVD_INLINE u32 add_acquire_release(u32* to, u32 value) {
  u32 before;
  asm volatile("atom.add.acq_rel.sys.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}
KVHVD_INLINE u32 compare_and_swap_relaxed(u32* to, u32 expected, u32 value) {
  u32 before;
  asm volatile("atom.cas.relaxed.sys.global.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(to), "r"(expected), "r"(value)
               : "memory");
  return before;
}
// A flag of the block, in shared memory, that several threads may write.
KVHVD_INLINE void store_shared(u32* to, u32 value) { *static_cast<volatile u32*>(to) = value; }

// ---- Waiting ----

// How many looks at a flag between two looks at the abort word and the clock, which may be in the host's memory.
constexpr u32 kLooks = 64;

KVHVD_INLINE void pause() { asm volatile("nanosleep.u32 64;"); }
KVHVD_INLINE u64 now_ns() {
  u64 time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// ---- Data ----

template <class Unit>
KVHVD_INLINE Unit load(const void* from);
template <>
KVHVD_INLINE Vector load<Vector>(const void* from) {
  Vector value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.words[0]), "=r"(value.words[1]), "=r"(value.words[2]), "=r"(value.words[3])
               : "l"(from));
  return value;
}
template <>
KVHVD_INLINE u64 load<u64>(const void* from) {
  u64 value;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(from));
  return value;
}
template <>
KVHVD_INLINE u32 load<u32>(const void* from) {
  u32 value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}
template <>
KVHVD_INLINE u16 load<u16>(const void* from) {
  u16 value;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(from));
  return value;
}
template <>
KVHVD_INLINE u8 load<u8>(const void* from) {
  u32 value;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(value) : "l"(from));
  return static_cast<u8>(value);
}

KVHVD_INLINE void store(void* to, Vector value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.words[0]), "r"(value.words[1]),
               "r"(value.words[2]), "r"(value.words[3]));
}
KVHVD_INLINE void store(void* to, u64 value) { asm volatile("st.global.u64 [%0], %1;" ::"l"(to), "l"(value)); }
KVHVD_INLINE void store(void* to, u32 value) { asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(value)); }
KVHVD_INLINE void store(void* to, u16 value) { asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(value)); }
KVHVD_INLINE void store(void* to, u8 value) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(to), "r"(static_cast<u32>(value)));
}

// ---- Arithmetic ----
// As instructions: CuPy compiles with -ftz=true, which would flush denormals in a plain a + b.

KVHVD_INLINE float add(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
KVHVD_INLINE float multiply(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}
KVHVD_INLINE double add(double a, double b) {
  double sum;
  asm("add.rn.f64 %0, %1, %2;" : "=d"(sum) : "d"(a), "d"(b));
  return sum;
}
KVHVD_INLINE double multiply(double a, double b) {
  double product;
  asm("mul.rn.f64 %0, %1, %2;" : "=d"(product) : "d"(a), "d"(b));
  return product;
}
KVHVD_INLINE float to_float(double wide) {
  float narrow;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrow) : "d"(wide));
  return narrow;
}
KVHVD_INLINE double to_double(float narrow) {
  double wide;
  asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(narrow));
  return wide;
}
KVHVD_INLINE float half_to_float(u16 half) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
  return wide;
}
// To nearest even. Which NaN a NaN becomes is not said.
KVHVD_INLINE u16 float_to_half(float wide) {
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(wide));
  return half;
}
KVHVD_INLINE u32 bits_of(float value) { return __float_as_uint(value); }
KVHVD_INLINE u64 bits_of(double value) { return static_cast<u64>(__double_as_longlong(value)); }
KVHVD_INLINE float float_of(u32 bits) { return __uint_as_float(bits); }
KVHVD_INLINE double double_of(u64 bits) { return __longlong_as_double(static_cast<i64>(bits)); }

}  // namespace kvstore_hvd::gpu
#endif
