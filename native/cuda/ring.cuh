// Ring allreduce: a reduce-scatter around the ring, then an allgather around it, in loops of one slot for each rank.
//
// A block is a ring of its own, a channel: block b of every rank handles the same part of the array. Ranks only write
// to the next one, into the slots of its FIFO, and tell it how many they have filled; it tells how many it has read.
// So a rank is up to kSlots steps ahead of the next one, and the blocks of a rank hide each other's waiting.
#pragma once

#include "elements.cuh"
#include "memory.cuh"
#include "waiting.cuh"

namespace kvstore_hvd::gpu {

// What a step does with a chunk.
enum class Step {
  kSend,     // own elements to the next rank
  kReduce,   // the previous rank's partial result, with the own elements, to the next
  kFinish,   // the same as the result: to the own output and the next rank
  kForward,  // a result of the previous rank to the own output and the next rank
  kTake,     // a result of the previous rank to the own output
};

// A part of the array, in vectors from its start.
struct Chunk {
  u64 first;
  u32 vectors;
};

template <class E, bool kSumOnly>
class Ring {
 public:
  KVHVD_INLINE Ring(const World& world, const Launch& launch, Shared& shared)
      : world_(world),
        launch_(launch),
        shared_(shared),
        input_(launch.inputs[player()].pointer),
        output_(launch.outputs[player()].pointer),
        aligned_(((low_bits(input_) | low_bits(output_)) & (kVectorBytes - 1)) == 0) {}

  KVHVD_INLINE void allreduce() {
    const u64 vectors = divided_up(launch_.bytes, kVectorBytes);
    if (world_.ranks == 1) {
      alone(vectors);
      return;
    }
    Control& own = *world_.control[world_.rank];
    // Counted on from launch to launch. Nobody else touches these words.
    sent_ = own.sent[block()].value;
    received_ = own.received[block()].value;
    if (thread() == 0) shared_.go = 1;
    block_sync();
    if (!loops(share_begin(vectors, blocks(), block()), share_begin(vectors, blocks(), block() + 1),
               share_begin(vectors, blocks(), 1))) {
      return;
    }
    if (thread() == 0) {
      own.sent[block()].value = sent_;
      own.received[block()].value = received_;
    }
  }

 private:
  // `longest` is the longest part of any block: all blocks of a ring make the same number of steps.
  KVHVD_INLINE bool loops(u64 begin, u64 end, u64 longest) {
    const u32 n = world_.ranks;
    const u32 rank = world_.rank;
    const u64 stride = u64{world_.slot_vectors} * n;
    for (u64 done = 0; done < longest; done += stride) {
      const u64 first = smaller(begin + done, end);
      const u64 total = smaller(end - first, stride);
      const auto chunk = [&](u32 k) {
        const u64 from = share_begin(total, n, k % n);
        return Chunk{first + from, static_cast<u32>(share_begin(total, n, k % n + 1) - from)};
      };
      // Chunk c starts at rank c and is complete at rank c - 1, from where the result goes around.
      if (!step<Step::kSend>(chunk(rank))) return false;
      for (u32 k = 1; k < n - 1; ++k) {
        if (!step<Step::kReduce>(chunk(rank + n - k))) return false;
      }
      if (!step<Step::kFinish>(chunk(rank + 1))) return false;
      for (u32 k = 1; k < n - 1; ++k) {
        if (!step<Step::kForward>(chunk(rank + 1 + n - k))) return false;
      }
      if (!step<Step::kTake>(chunk(rank + 2))) return false;
    }
    return true;
  }

  template <Step kStep>
  KVHVD_INLINE bool step(const Chunk& chunk) {
    constexpr bool kReceives = kStep != Step::kSend;
    constexpr bool kSends = kStep != Step::kTake;
    const u32 channel = block();
    const u32 next = (world_.rank + 1) % world_.ranks;
    const u32 previous = (world_.rank + world_.ranks - 1) % world_.ranks;
    const Control& own = *world_.control[world_.rank];
    // Two threads, so that the two flags are waited for at once.
    if (kReceives && thread() == 0 &&
        !wait_for(world_, launch_, own.filled[channel], received_ + 1, previous, kFilledSlot)) {
      store_shared(&shared_.go, 0);
    }
    if (kSends && thread() == threads() - 1 &&
        !wait_for(world_, launch_, own.freed[channel], sent_ + 1 - kSlots, next, kFreeSlot)) {
      store_shared(&shared_.go, 0);
    }
    block_sync();  // what the neighbours did before their flags is before what any thread does now
    if (shared_.go == 0) return false;
    move<kStep>(chunk, slot(world_.rank, received_), slot(next, sent_));
    block_sync();  // all threads' accesses are before the flags
    // Release: the slot is written before it counts as filled, and read before it counts as free.
    if (kSends && thread() == 0) store_release(&world_.control[next]->filled[channel].value, sent_ + 1);
    if (kReceives && thread() == threads() - 1) {
      store_release(&world_.control[previous]->freed[channel].value, received_ + 1);
    }
    if (kSends) ++sent_;
    if (kReceives) ++received_;
    return true;
  }

  KVHVD_INLINE u8* slot(u32 rank, u32 count) const {
    return world_.fifo[rank] + (u64{block()} * kSlots + count % kSlots) * world_.slot_vectors * kVectorBytes;
  }

  template <Step kStep>
  KVHVD_INLINE void move(const Chunk& chunk, const u8* from, u8* to) {
    constexpr u32 kAtOnce = kInFlight<E, kSumOnly>;
    const u64 first = chunk.first * kVectorBytes;
    // Only the last vector of the array can be cut.
    const bool cut = first + chunk.vectors * u64{kVectorBytes} > launch_.bytes;
    const u32 whole = aligned_ ? chunk.vectors - (cut ? 1 : 0) : 0;
    const u32 step = threads();
    u32 i = thread();
    for (; i + (kAtOnce - 1) * step < whole; i += kAtOnce * step) {
      Vector received[kAtOnce];
      Vector mine[kAtOnce];
      KVHVD_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) {
        const u32 at = i + k * step;
        if (reads<kStep>()) mine[k] = load<Vector>(input_ + first + at * kVectorBytes);
        if (kStep != Step::kSend) received[k] = load<Vector>(from + at * kVectorBytes);
      }
      KVHVD_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) {
        const u32 at = i + k * step;
        const Vector out = outcome<kStep>(mine[k], received[k]);
        if (kStep != Step::kTake) store(to + at * kVectorBytes, out);
        if (writes<kStep>()) store(output_ + first + at * kVectorBytes, out);
      }
    }
    for (; i < chunk.vectors; i += step) {
      const u64 byte = first + i * kVectorBytes;
      const u32 bytes = cut_to(launch_.bytes - byte);
      Vector mine = {};
      Vector received = {};
      if (reads<kStep>()) mine = load_part(input_ + byte, bytes);
      if (kStep != Step::kSend) received = load<Vector>(from + i * kVectorBytes);
      const Vector out = outcome<kStep>(mine, received);
      if (kStep != Step::kTake) store(to + i * kVectorBytes, out);
      if (writes<kStep>()) store_part(output_ + byte, out, bytes);
    }
  }

  static KVHVD_INLINE u32 cut_to(u64 bytes) { return static_cast<u32>(smaller(bytes, u64{kVectorBytes})); }

  template <Step kStep>
  static constexpr KVHVD_INLINE bool reads() {
    return kStep == Step::kSend || kStep == Step::kReduce || kStep == Step::kFinish;
  }
  template <Step kStep>
  static constexpr KVHVD_INLINE bool writes() {
    return kStep == Step::kFinish || kStep == Step::kForward || kStep == Step::kTake;
  }

  template <Step kStep>
  KVHVD_INLINE Vector outcome(const Vector& mine, const Vector& received) const {
    if constexpr (!reads<kStep>()) {
      return received;
    } else {
      Sums<E> own;
      own.take(mine, prescale_of(launch_));
      if constexpr (kStep == Step::kSend) {
        return own.suspend();
      } else {
        Sums<E> sums;
        sums.resume(received);
        sums.template combine<kSumOnly>(launch_.op, own);
        return kStep == Step::kFinish ? sums.finish(postscale_of(launch_)) : sums.suspend();
      }
    }
  }

  // The only rank: the own elements, scaled; bit by bit where there is nothing to compute.
  KVHVD_INLINE void alone(u64 vectors) const {
    for (u64 i = u64{block()} * threads() + thread(); i < vectors; i += u64{blocks()} * threads()) {
      const u32 bytes = cut_to(launch_.bytes - i * kVectorBytes);
      Vector vector = load_part(input_ + i * kVectorBytes, bytes);
      if (!is_plain(launch_) || E::kAsHalf) {
        Sums<E> sums;
        sums.take(vector, prescale_of(launch_));
        vector = sums.finish(postscale_of(launch_));
      }
      store_part(output_ + i * kVectorBytes, vector, bytes);
    }
  }

  const World& world_;
  const Launch& launch_;
  Shared& shared_;
  const u8* const input_;
  u8* const output_;
  const bool aligned_;
  u32 sent_ = 0;
  u32 received_ = 0;
};

}  // namespace kvstore_hvd::gpu
