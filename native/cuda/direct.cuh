// Collectives over staging memory that every rank reads, or writes, directly.
//
// A rank copies its inputs into its own staging memory, all ranks meet, and then everything that any of them needs is
// there. What they leave in staging memory may still be read by others when the kernel has ended, which is why the next
// launch uses another part of it; in the launch after that one this part is free: a rank that has met the others there
// has ended this launch.
#pragma once

#include "elements.cuh"

namespace kvstore_hvd::gpu {

KVHVD_INLINE u8* staging_of(const World& world, const Launch& launch, u32 rank) {
  return world.staging[rank] + launch.staging_offset;
}
// The tables of the ranks of a launch stand one after another.
KVHVD_INLINE const Segment* inputs_of(const Launch& launch) { return launch.inputs + player() * u64{launch.n_inputs}; }
KVHVD_INLINE const Segment* outputs_of(const Launch& launch) {
  return launch.outputs + player() * u64{launch.n_outputs};
}

KVHVD_INLINE void copy_in(const World& world, const Launch& launch) {
  u8* const staging = staging_of(world, launch, world.rank);
  for_tiles(inputs_of(launch), launch.n_inputs, kTileBytes, [&](const Segment& segment, u64 first, u32 bytes) {
    copy_bytes(staging + segment.offset + first, segment.pointer + first, bytes);
  });
}
KVHVD_INLINE void copy_out(const World& world, const Launch& launch) {
  const u8* const staging = staging_of(world, launch, world.rank);
  for_tiles(outputs_of(launch), launch.n_outputs, kTileBytes, [&](const Segment& segment, u64 first, u32 bytes) {
    copy_bytes(segment.pointer + first, staging + segment.offset + first, bytes);
  });
}

// Copies the inputs and meets the other ranks; false when the block is to leave.
KVHVD_INLINE bool meet_with_inputs(const World& world, const Launch& launch, Shared& shared) {
  if (launch.meet == 0) return true;
  Control& own = *world.control[world.rank];
  if (thread() == 0) shared.launches = load_relaxed(&own.launches.value);
  copy_in(world, launch);
  block_sync();
  const u32 launches = shared.launches;
  if (!meet(world, launch, 2 * launches + 1, kStart, shared)) return false;
  // All blocks of this rank have arrived, and so have read it. The next launch reads it after this one has ended.
  if (block() == 0 && thread() == 0) store_relaxed(&own.launches.value, launches + 1);
  return true;
}

// The bytes between two vectors of a thread.
KVHVD_INLINE u32 stride() { return threads() * kVectorBytes; }

// Reduces kAtOnce vectors, from byte `at` on, of the staging memory of all ranks in rank order, and gives each to
// sink(byte, result). kRanks is the number of ranks, 0 when it is known to the world only.
template <class E, bool kSumOnly, u32 kRanks, u32 kAtOnce, class Sink>
KVHVD_INLINE void reduce_vectors(const World& world, const Launch& launch, u64 at, const Sink& sink) {
  const u32 ranks = kRanks != 0 ? kRanks : world.ranks;
  const Scale prescale = prescale_of(launch);
  const Scale postscale = postscale_of(launch);
  Sums<E> sums[kAtOnce];
  const u8* const first = staging_of(world, launch, 0) + at;
  Vector inputs[kAtOnce];
  KVHVD_UNROLL
  for (u32 k = 0; k < kAtOnce; ++k) inputs[k] = load<Vector>(first + k * stride());
  KVHVD_UNROLL
  for (u32 k = 0; k < kAtOnce; ++k) sums[k].take(inputs[k], prescale);
  KVHVD_UNROLL
  for (u32 rank = 1; rank < ranks; ++rank) {
    const u8* const from = staging_of(world, launch, rank) + at;
    KVHVD_UNROLL
    for (u32 k = 0; k < kAtOnce; ++k) inputs[k] = load<Vector>(from + k * stride());
    KVHVD_UNROLL
    for (u32 k = 0; k < kAtOnce; ++k) {
      Sums<E> next;
      next.take(inputs[k], prescale);
      sums[k].template combine<kSumOnly>(launch.op, next);
    }
  }
  KVHVD_UNROLL
  for (u32 k = 0; k < kAtOnce; ++k) sink(at + k * stride(), sums[k].finish(postscale));
}

// The same for `vectors` vectors from byte `begin` on, by the threads of the block.
template <class E, bool kSumOnly, u32 kRanks, class Sink>
KVHVD_INLINE void reduce_range(const World& world, const Launch& launch, u64 begin, u32 vectors, const Sink& sink) {
  // The loads of eight ranks are many as they are, and a loop over the ranks needs registers of its own.
  constexpr bool kFew = kRanks != 0 && kRanks <= 4;
  constexpr u32 kAtOnce = !kSumOnly ? 1
                          : kFew    ? E::kInFlight
                                    : smaller(E::kInFlight, kRanks == 8 && kLanes<E> == 8 ? 1U : 2U);
  u32 i = thread();
  if constexpr (kAtOnce > 1) {
    for (; i + (kAtOnce - 1) * threads() < vectors; i += kAtOnce * threads()) {
      reduce_vectors<E, kSumOnly, kRanks, kAtOnce>(world, launch, begin + i * u64{kVectorBytes}, sink);
    }
  }
  for (; i < vectors; i += threads()) {
    reduce_vectors<E, kSumOnly, kRanks, 1>(world, launch, begin + i * u64{kVectorBytes}, sink);
  }
}

template <class E, bool kSumOnly>
KVHVD_INLINE void oneshot(const World& world, const Launch& launch, Shared& shared) {
  if (!meet_with_inputs(world, launch, shared)) return;
  for_tiles(outputs_of(launch), launch.n_outputs, kTileBytes, [&](const Segment& segment, u64 first, u32 bytes) {
    const u64 begin = segment.offset + first;
    const u64 end = begin + bytes;
    u8* const output = segment.pointer - segment.offset;
    const bool aligned = (low_bits(output) & (kVectorBytes - 1)) == 0;
    const u32 vectors = divided_up(bytes, kVectorBytes);
    reduce_range<E, kSumOnly, 0>(world, launch, begin, vectors, [&](u64 at, const Vector& result) {
      if (aligned && at + kVectorBytes <= end) {
        store(output + at, result);
      } else {
        store_part(output + at, result, static_cast<u32>(smaller(end - at, u64{kVectorBytes})));
      }
    });
  });
}

template <class E, bool kSumOnly, u32 kRanks>
KVHVD_INLINE void twoshot(const World& world, const Launch& launch, Shared& shared) {
  if (!meet_with_inputs(world, launch, shared)) return;
  const u64 vectors = divided_up(launch.bytes, u64{kVectorBytes});
  // Alone, this launch reduces the shares of all ranks.
  const u32 share = launch.meet != 0 ? world.rank : 0;
  const u32 shares = launch.meet != 0 ? world.ranks : 1;
  const u64 first = share_begin(vectors, shares, share);
  const u64 length = share_begin(vectors, shares, share + 1) - first;
  const u64 begin = first + share_begin(length, blocks(), block());
  const u32 mine = static_cast<u32>(first + share_begin(length, blocks(), block() + 1) - begin);
  reduce_range<E, kSumOnly, kRanks>(world, launch, begin * kVectorBytes, mine, [&](u64 at, const Vector& result) {
    const u32 ranks = kRanks != 0 ? kRanks : world.ranks;
    KVHVD_UNROLL
    for (u32 rank = 0; rank < ranks; ++rank) store(staging_of(world, launch, rank) + at, result);
  });
  if (launch.meet == 0) return;
  if (!meet(world, launch, 2 * shared.launches + 2, kEnd, shared)) return;
  copy_out(world, launch);
}

KVHVD_INLINE void exchange(const World& world, const Launch& launch, Shared& shared) {
  if (!meet_with_inputs(world, launch, shared)) return;
  for_tiles(outputs_of(launch), launch.n_outputs, kTileBytes, [&](const Segment& segment, u64 first, u32 bytes) {
    copy_bytes(segment.pointer + first, staging_of(world, launch, segment.rank) + segment.offset + first, bytes);
  });
}

}  // namespace kvstore_hvd::gpu
