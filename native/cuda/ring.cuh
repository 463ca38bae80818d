// Ring allreduce: a reduce-scatter around the ring, then an allgather around it, in loops of one slot for each rank.
//
// A block is a ring of its own, a channel: block b of every rank handles the same part of the array. Ranks only write
// to the next one, into the slots of its FIFO, and tell it how many they have filled; it tells how many it has read.
// So a rank is up to kSlots steps ahead of the next one, and the blocks of a rank hide each other's waiting.
#pragma once

#include "elements.cuh"

namespace kvstore_hvd::gpu {

// What a step does with a chunk.
enum class Step {
  kSend,     // own elements to the next rank
  kReduce,   // the previous rank's partial result, with the own elements, to the next
  kFinish,   // the same as the result: to the own output and the next rank
  kForward,  // a result of the previous rank to the own output and the next rank
  kTake,     // a result of the previous rank to the own output
};

template <class E, bool kSumOnly>
class Ring {
 public:
  KVHVD_INLINE Ring(const World& world, const Launch& launch, Shared& shared)
      : world_(world), launch_(launch), shared_(shared) {}

  KVHVD_INLINE void allreduce() {
    const u64 vectors = divided_up(launch_.bytes, u64{kVectorBytes});
    // Counted on from launch to launch. No other block touches the word; thread 0 writes it when all have read it.
    u32& steps = world_.control[world_.rank]->steps[block()].value;
    sent_ = steps;
    if (thread() == 0) {
      shared_.go = 1;
      shared_.input = launch_.inputs[player()].pointer;
      shared_.output = launch_.outputs[player()].pointer;
      shared_.begin = share_begin(vectors, blocks(), block());
      shared_.end = share_begin(vectors, blocks(), block() + 1);
    }
    block_sync();
    if (run(share_begin(vectors, blocks(), 1)) && thread() == 0) steps = sent_;
  }

 private:
  // `longest` is the longest part of any block: all blocks of a ring make the same number of steps.
  KVHVD_INLINE bool run(u64 longest) {
    const u32 n = world_.ranks;
    const u32 rank = world_.rank;
    const u32 stride = world_.slot_vectors * n;
    const u32 loops = static_cast<u32>(divided_up(longest, u64{stride}));
    for (u32 loop = 0; loop < loops; ++loop) {
      const u64 first = smaller(shared_.begin + loop * u64{stride}, shared_.end);
      const u32 total = static_cast<u32>(smaller(shared_.end - first, u64{stride}));
      // Chunk c starts at rank c, is complete at rank c - 1, and from there the result goes around.
      for (u32 k = 0; k <= 2 * n - 2; ++k) {
        const u32 chunk = (rank + 2 * n - k) % n;
        const u32 from = share_begin(total, n, chunk);
        if (!step(k, first + from, share_begin(total, n, chunk + 1) - from)) return false;
      }
    }
    return true;
  }

  // Step k of a loop, with the `vectors` vectors of the array from vector `first` on.
  KVHVD_INLINE bool step(u32 k, u64 first, u32 vectors) {
    const u32 n = world_.ranks;
    const u32 channel = block();
    const u32 next = (world_.rank + 1) % n;
    const u32 previous = (world_.rank + n - 1) % n;
    const u32 received = sent_ - 1;  // each rank sends once before it receives, and as often
    const bool receives = k != 0;
    const bool sends = k != 2 * n - 2;
    const Control& own = *world_.control[world_.rank];
    // Two threads, so that the two flags are waited for at once.
    if (receives && thread() == 0 &&
        !wait_for(world_, launch_, own.filled[channel], received + 1, previous, kFilledSlot)) {
      store_shared(&shared_.go, 0);
    }
    if (sends && thread() == threads() - 1 &&
        !wait_for(world_, launch_, own.freed[channel], sent_ + 1 - kSlots, next, kFreeSlot)) {
      store_shared(&shared_.go, 0);
    }
    block_sync();  // what the neighbours did before their flags is before what any thread does now
    if (shared_.go == 0) return false;
    const u8* const from = slot(world_.rank, received);
    u8* const to = slot(next, sent_);
    if (k == 0) {
      move<Step::kSend>(first, vectors, from, to);
    } else if (k < n - 1) {
      move<Step::kReduce>(first, vectors, from, to);
    } else if (k == n - 1) {
      move<Step::kFinish>(first, vectors, from, to);
    } else if (sends) {
      move<Step::kForward>(first, vectors, from, to);
    } else {
      move<Step::kTake>(first, vectors, from, to);
    }
    block_sync();  // all threads' accesses are before the flags
    // Release: the slot is written before it counts as filled, and read before it counts as free.
    if (sends && thread() == 0) store_release(&world_.control[next]->filled[channel].value, sent_ + 1);
    if (receives && thread() == threads() - 1) {
      store_release(&world_.control[previous]->freed[channel].value, received + 1);
    }
    if (sends) ++sent_;
    return true;
  }

  KVHVD_INLINE u8* slot(u32 rank, u32 count) const {
    return world_.fifo[rank] + (u64{block()} * kSlots + count % kSlots) * world_.slot_vectors * kVectorBytes;
  }

  template <Step kStep>
  KVHVD_INLINE void move(u64 first_vector, u32 vectors, const u8* from, u8* to) {
    // A step loads two arrays, and each block waits for its neighbours on its own: two of each are enough.
    constexpr u32 kAtOnce = kSumOnly ? smaller(E::kInFlight, 2U) : 1;
    const u32 stride = threads() * kVectorBytes;
    // Of the chunk, and then from this thread's first vector on: the pointers move, the offsets are constants.
    const u64 byte = first_vector * kVectorBytes;
    const u8* input = shared_.input + byte;
    u8* output = shared_.output + byte;
    const bool aligned = ((low_bits(input) | low_bits(output)) & (kVectorBytes - 1)) == 0;
    // Only the last vector of the array can be cut.
    const bool cut = vectors != 0 && byte + vectors * u64{kVectorBytes} > launch_.bytes;
    const u32 whole = aligned ? vectors - (cut ? 1 : 0) : 0;
    u32 i = thread();
    const auto advance = [&](u32 times) {
      i += times * threads();
      input += times * stride;
      output += times * stride;
      from += times * stride;
      to += times * stride;
    };
    input += i * kVectorBytes;
    output += i * kVectorBytes;
    from += i * kVectorBytes;
    to += i * kVectorBytes;
    while (i + (kAtOnce - 1) * threads() < whole) {
      Vector received[kAtOnce];
      Vector mine[kAtOnce];
      KVHVD_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) {
        if (reads<kStep>()) mine[k] = load<Vector>(input + k * stride);
        if (kStep != Step::kSend) received[k] = load<Vector>(from + k * stride);
      }
      KVHVD_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) {
        const Vector out = outcome<kStep>(mine[k], received[k]);
        if (kStep != Step::kTake) store(to + k * stride, out);
        if (writes<kStep>()) store(output + k * stride, out);
      }
      advance(kAtOnce);
    }
    while (i < vectors) {
      const u32 bytes = cut_to(launch_.bytes - byte - i * kVectorBytes);
      Vector mine = {};
      Vector received = {};
      if (reads<kStep>()) mine = load_part(input, bytes);
      if (kStep != Step::kSend) received = load<Vector>(from);
      const Vector out = outcome<kStep>(mine, received);
      if (kStep != Step::kTake) store(to, out);
      if (writes<kStep>()) store_part(output, out, bytes);
      advance(1);
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

  const World& world_;
  const Launch& launch_;
  Shared& shared_;
  u32 sent_ = 0;  // slots filled
};

template <class E, bool kSumOnly>
KVHVD_INLINE void ring(const World& world, const Launch& launch, Shared& shared) {
  Ring<E, kSumOnly>(world, launch, shared).allreduce();
}

}  // namespace kvstore_hvd::gpu
