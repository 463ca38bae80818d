// Many tensors to one buffer and back, each element converted and scaled on the way.
#pragma once

#include "elements.cuh"

namespace kvstore_hvd::gpu {

KVHVD_INLINE void copy_raw(const Copy& copy) {
  for_tiles(copy.segments, copy.n_segments, kTileBytes, [&](const Segment& segment, u64 first, u32 bytes) {
    u8* const tensor = segment.pointer + first;
    u8* const fused = copy.buffer + segment.offset + first;
    if (copy.into_buffer != 0) {
      copy_bytes(fused, tensor, bytes);
    } else {
      copy_bytes(tensor, fused, bytes);
    }
  });
}

// One element, scaled in the wider type of the two (at least float32, integers in float64) and rounded.
template <class From, class To>
KVHVD_INLINE typename To::Raw converted(typename From::Raw raw, const Scale& scale) {
  if constexpr (sizeof(typename From::Sum) == sizeof(typename To::Sum)) {
    return To::narrow(From::scaled(From::widen(raw), scale));
  } else if constexpr (sizeof(typename From::Sum) == 8) {
    return To::narrow(to_float(multiply(From::widen(raw), scale.wide)));
  } else {
    return To::narrow(multiply(to_double(From::widen(raw)), scale.wide));
  }
}

template <class From, class To>
KVHVD_INLINE void convert_tile(u8* to, const u8* from, u32 elements, const Scale& scale) {
  using FromRaw = typename From::Raw;
  using ToRaw = typename To::Raw;
  // As many elements as fill a vector of the narrower type: whole vectors on both sides.
  constexpr u32 kGroup = sizeof(Vector) / (sizeof(FromRaw) < sizeof(ToRaw) ? sizeof(FromRaw) : sizeof(ToRaw));
  constexpr u32 kLoads = kGroup * sizeof(FromRaw) / sizeof(Vector);
  constexpr u32 kStores = kGroup * sizeof(ToRaw) / sizeof(Vector);
  constexpr u32 kAtOnce = kLoads + kStores <= 2 && kGroup <= 8 ? 4 : 1;
  u32 done = 0;
  if (((low_bits(to) | low_bits(from)) & (kVectorBytes - 1)) == 0) {
    const u32 groups = elements / kGroup;
    done = groups * kGroup;
    for (u32 group = thread(); group < groups; group += kAtOnce * threads()) {
      Vector in[kAtOnce][kLoads];
      KVHVD_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) {
        const u32 at = group + k * threads();
        if (at >= groups) break;
        KVHVD_UNROLL
        for (u32 i = 0; i < kLoads; ++i) in[k][i] = load<Vector>(from + (at * kLoads + i) * kVectorBytes);
      }
      KVHVD_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) {
        const u32 at = group + k * threads();
        if (at >= groups) break;
        Vector out[kStores] = {};
        KVHVD_UNROLL
        for (u32 i = 0; i < kGroup; ++i) {
          constexpr u32 kIn = kLanes<From>;
          constexpr u32 kOut = kLanes<To>;
          put_lane(out[i / kOut], i % kOut, converted<From, To>(lane<FromRaw>(in[k][i / kIn], i % kIn), scale));
        }
        KVHVD_UNROLL
        for (u32 i = 0; i < kStores; ++i) store(to + (at * kStores + i) * kVectorBytes, out[i]);
      }
    }
  }
  for (u32 i = done + thread(); i < elements; i += threads()) {
    store(to + i * sizeof(ToRaw), converted<From, To>(load<FromRaw>(from + i * sizeof(FromRaw)), scale));
  }
}

// The buffer holds elements of type Fused, the tensors of type Tensor.
template <class Tensor, class Fused>
KVHVD_INLINE void copy_converted(const Copy& copy) {
  const Scale scale = {copy.scale, copy.scale32};
  for_tiles(copy.segments, copy.n_segments, kTileElements, [&](const Segment& segment, u64 first, u32 elements) {
    u8* const tensor = segment.pointer + first * sizeof(typename Tensor::Raw);
    u8* const fused = copy.buffer + (segment.offset + first) * sizeof(typename Fused::Raw);
    if (copy.into_buffer != 0) {
      convert_tile<Tensor, Fused>(fused, tensor, elements, scale);
    } else {
      convert_tile<Fused, Tensor>(tensor, fused, elements, scale);
    }
  });
}

}  // namespace kvstore_hvd::gpu
