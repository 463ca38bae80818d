// The kernels by name. kvstore_hvd/gpu/kernels.py says what each does and which exist; there the names are made.
//
// KVHVD_ONLY, the number of an element type, leaves out the kernels of the others: a program needs one or two, and
// compiling one takes a second.
#include "copy.cuh"
#include "direct.cuh"
#include "ring.cuh"

#define KVHVD_COPY(name, Tensor, Fused) \
  KVHVD_KERNEL(2) kvhvd_copy_##name(KVHVD_BY_VALUE Copy copy) { copy_converted<Tensor, Fused>(copy); }

#define KVHVD_MEETING(name, resident, what)                                                \
  KVHVD_KERNEL(resident) kvhvd_##name(const World* worlds, KVHVD_BY_VALUE Launch launch) { \
    KVHVD_SHARED(Shared, shared);                                                          \
    what(worlds[player()], launch, shared);                                                \
  }

// suffix: what the name says about the operation
#define KVHVD_ALLREDUCE(dtype, suffix, Element, sum_only)                                     \
  KVHVD_MEETING(oneshot_##dtype##suffix, kResident<Element>, (oneshot<Element, sum_only>))    \
  KVHVD_MEETING(twoshot_##dtype##suffix, kResident<Element>, (twoshot<Element, sum_only, 0>)) \
  KVHVD_MEETING(ring_##dtype##suffix, kResident<Element>, (ring<Element, sum_only>))

#define KVHVD_FAST(dtype, Element)                                       \
  KVHVD_COPY(dtype##_##dtype, Element, Element)                          \
  KVHVD_ALLREDUCE(dtype, _sum, Element, true)                            \
  KVHVD_ALLREDUCE(dtype, _other, Element, false)                         \
  KVHVD_MEETING(twoshot_##dtype##_sum_2, 2, (twoshot<Element, true, 2>)) \
  KVHVD_MEETING(twoshot_##dtype##_sum_4, 2, (twoshot<Element, true, 4>)) \
  KVHVD_MEETING(twoshot_##dtype##_sum_8, 2, (twoshot<Element, true, 8>))

#define KVHVD_PLAIN(dtype, Element)             \
  KVHVD_COPY(dtype##_##dtype, Element, Element) \
  KVHVD_ALLREDUCE(dtype, , Element, false)

namespace kvstore_hvd::gpu {

KVHVD_KERNEL(2) kvhvd_sizes(u32* out) {
  const u32 sizes[] = {sizeof(Segment), sizeof(World), sizeof(Launch), sizeof(Copy), sizeof(Control),
                       kMaxRanks,       kMaxChannels,  kSlots,         kTileBytes,   kTileElements};
  for (u32 i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i) {
    if (thread() == 0) out[i] = sizes[i];
  }
}
KVHVD_KERNEL(2) kvhvd_copy(KVHVD_BY_VALUE Copy copy) { copy_raw(copy); }
KVHVD_MEETING(exchange, 2, exchange)

#if !defined(KVHVD_ONLY) || KVHVD_ONLY == 0
KVHVD_FAST(float16, Float16)
KVHVD_COPY(float16_float32, Float16, Float32)
KVHVD_COPY(float16_float64, Float16, Float64)
#endif
#if !defined(KVHVD_ONLY) || KVHVD_ONLY == 1
KVHVD_FAST(bfloat16, BFloat16)
KVHVD_COPY(bfloat16_float32, BFloat16, Float32)
#endif
#if !defined(KVHVD_ONLY) || KVHVD_ONLY == 2
KVHVD_FAST(float32, Float32)
KVHVD_ALLREDUCE(float32, _as_half, Float32AsHalf, true)
KVHVD_COPY(float32_float16, Float32, Float16)
KVHVD_COPY(float32_bfloat16, Float32, BFloat16)
#endif
#if !defined(KVHVD_ONLY) || KVHVD_ONLY == 3
KVHVD_PLAIN(float64, Float64)
KVHVD_ALLREDUCE(float64, _as_half, Float64AsHalf, true)
KVHVD_COPY(float64_float16, Float64, Float16)
#endif
#if !defined(KVHVD_ONLY) || KVHVD_ONLY == 4
KVHVD_PLAIN(int8, Int8)
#endif
#if !defined(KVHVD_ONLY) || KVHVD_ONLY == 5
KVHVD_PLAIN(uint8, UInt8)
#endif
#if !defined(KVHVD_ONLY) || KVHVD_ONLY == 6
KVHVD_PLAIN(int32, Int32)
#endif
#if !defined(KVHVD_ONLY) || KVHVD_ONLY == 7
KVHVD_PLAIN(int64, Int64)
#endif

}  // namespace kvstore_hvd::gpu
