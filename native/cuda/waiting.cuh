// Waiting for other ranks: always bounded, and never silently.
#pragma once

#include "layout.cuh"

namespace kvstore_hvd::gpu {

enum Cause : u32 { kTimeout = 1, kAborted = 2 };
enum Place : u32 { kStart = 1, kEnd = 2, kFilledSlot = 3, kFreeSlot = 4 };

// What the threads of a block tell each other, in shared memory.
struct Shared {
  u32 go;        // 0: leave
  u32 last;      // of the blocks to arrive at a meeting
  u32 launches;  // before this one
  // Of a ring. Here, because registers are scarce there.
  const u8* input;
  u8* output;
  u64 begin;  // of the block's part, in vectors
  u64 end;
};

// Makes every block of every rank leave at its next wait. The first word of a rank stays, and becomes its status.
// Relaxed: the word publishes nothing but itself.
KVHVD_INLINE void stop_all(const World& world, Cause cause, u32 awaited, Place place) {
  const u32 word = cause | world.rank << 8 | awaited << 16 | static_cast<u32>(place) << 24;
  const u32 before = compare_and_swap_relaxed(&world.control[world.rank]->stop.value, 0, word);
  if (before != 0) {
    // Somebody else was first, perhaps a moment ago: still the host must not take this launch for a good one.
    store_relaxed(world.status, before);
    return;
  }
  store_relaxed(world.status, word);
  for (u32 rank = 0; rank < world.ranks; ++rank) {
    if (rank != world.rank) store_relaxed(&world.control[rank]->stop.value, word);
  }
}

// Called by one thread. Returns true once `counter`, which rank `awaited` writes, has reached `wanted`: what that rank
// did before it stored the value is then before what this thread does. Returns false when somebody stops, or after
// the time limit.
KVHVD_INLINE bool wait_for(const World& world, const Launch& launch, const Counter& counter, u32 wanted, u32 awaited,
                           Place place) {
  u64 began = 0;
  // The signed distance: counters wrap around.
  for (u32 look = 1; static_cast<i32>(load_acquire(&counter.value) - wanted) < 0; ++look) {
    if (look % kLooks != 0) continue;
    pause();
    const u32 word = load_relaxed(&world.control[world.rank]->stop.value);
    if (word != 0) {
      store_relaxed(world.status, word);
      return false;
    }
    if (load_relaxed(world.abort) != 0) {
      stop_all(world, kAborted, awaited, place);
      return false;
    }
    const u64 now = now_ns();
    if (began == 0) {
      began = now;
    } else if (now - began > launch.timeout_ns) {
      stop_all(world, kTimeout, awaited, place);
      return false;
    }
  }
  return true;
}

// Meeting of all blocks of all ranks; called by all threads. Returns true once every block of every rank has called it
// with this number: what they did before is then before what this block does. Numbers grow by at least 1 from meeting
// to meeting. Returns false when the block is to leave.
KVHVD_INLINE bool meet(const World& world, const Launch& launch, u32 number, Place place, Shared& shared) {
  Control& own = *world.control[world.rank];
  block_sync();  // the block's accesses are before what thread 0 does
  if (thread() == 0) {
    shared.go = 1;
    shared.last = 1;
    // Release: this block's accesses are before the flags that the last block to arrive stores; acquire: so are those
    // of the blocks that arrived before it.
    if (blocks() > 1 && add_acquire_release(&own.arrived.value, 1) + 1 != blocks()) shared.last = 0;
    // Nobody adds again before having seen the flag that this block is about to store.
    if (shared.last != 0) store_relaxed(&own.arrived.value, 0);
  }
  block_sync();
  // All flags before the first wait: whoever waits for this rank must not wait for another one through it.
  // Release: all accesses of this rank, gathered above, are before the flag.
  for (u32 rank = thread(); shared.last != 0 && rank < world.ranks; rank += threads()) {
    store_release(&world.control[rank]->met[world.rank].value, number);
  }
  for (u32 rank = thread(); rank < world.ranks; rank += threads()) {
    if (!wait_for(world, launch, own.met[rank], number, rank, place)) store_shared(&shared.go, 0);
  }
  block_sync();  // what the ranks did before their flags is before what any thread does now
  return shared.go != 0;
}

}  // namespace kvstore_hvd::gpu
