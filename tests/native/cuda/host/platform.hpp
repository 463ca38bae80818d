// platform.cuh for g++ and clang++: the same names, on a machine of machine.hpp.
//
// Flags are real atomics with the orders that the kernels name, and data are plain memory, so that the thread sanitizer
// sees what orders what. Nothing here is stronger than on a GPU: block_sync() orders a block's threads, and nothing
// else does but the flags.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../../reduce_cases.hpp"
#include "machine.hpp"

#define KVHVD_INLINE inline
#define KVHVD_UNROLL
#define KVHVD_ROLLED
#define KVHVD_KERNEL(resident) extern "C" void
#define KVHVD_BY_VALUE const
#define KVHVD_SHARED(Type, name) Type& name = host::shared<Type>()

namespace kvstore_hvd::gpu {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i8 = std::int8_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

struct alignas(16) Vector {
  u32 words[4];
};

// Small, so that small arrays have many.
constexpr u32 kTileBytes = 256;
constexpr u32 kTileElements = 64;

namespace host {
template <class Type>
Type& shared() {
  static_assert(sizeof(Type) <= sizeof(Block::shared));
  return *reinterpret_cast<Type*>(current->block_state->shared);
}
inline void look() { current->machine->look(*current); }
inline void touch() { current->machine->touch(*current); }
}  // namespace host

inline u32 thread() { return host::current->thread; }
inline u32 threads() { return host::current->block_state->threads; }
inline u32 block() { return host::current->block; }
inline u32 blocks() { return host::current->blocks; }
inline u32 player() { return host::current->player; }

inline void block_sync() { host::current->machine->sync(*host::current); }

inline u32 load_acquire(const u32* from) {
  host::look();
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
inline u32 load_relaxed(const u32* from) {
  host::look();
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
inline void store_release(u32* to, u32 value) {
  host::touch();
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
inline void store_relaxed(u32* to, u32 value) {
  host::touch();
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
}
inline u32 add_acquire_release(u32* to, u32 value) {
  host::touch();
  return __atomic_fetch_add(to, value, __ATOMIC_ACQ_REL);
}
inline u32 compare_and_swap_relaxed(u32* to, u32 expected, u32 value) {
  host::touch();
  __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
inline void store_shared(u32* to, u32 value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }

constexpr u32 kLooks = 1;  // every look at a flag lets another thread run
inline void pause() { host::current->machine->pause(*host::current); }
inline u64 now_ns() { return host::current->machine->now_ns(*host::current); }

template <class Unit>
Unit load(const void* from) {
  host::touch();
  return *static_cast<const Unit*>(from);
}
template <class Unit>
void store(void* to, Unit value) {
  host::touch();
  *static_cast<Unit*>(to) = value;
}

inline float add(float a, float b) { return a + b; }
inline float multiply(float a, float b) { return a * b; }
inline double add(double a, double b) { return a + b; }
inline double multiply(double a, double b) { return a * b; }
inline float to_float(double wide) { return static_cast<float>(wide); }
inline double to_double(float narrow) { return narrow; }

template <class To, class From>
To same_bits(From value) {
  To result;
  static_assert(sizeof(result) == sizeof(value));
  std::memcpy(&result, &value, sizeof(result));
  return result;
}
inline u32 bits_of(float value) { return same_bits<u32>(value); }
inline u64 bits_of(double value) { return same_bits<u64>(value); }
inline float float_of(u32 bits) { return same_bits<float>(bits); }
inline double double_of(u64 bits) { return same_bits<double>(bits); }

inline float half_to_float(u16 half) { return static_cast<float>(reduce_tests::decode(half, 5, 10)); }
// A NaN becomes the one that a GPU makes.
inline u16 float_to_half(float wide) {
  return std::isnan(wide) ? u16{0x7fff} : reduce_tests::encode(static_cast<double>(wide), 5, 10);
}

}  // namespace kvstore_hvd::gpu
