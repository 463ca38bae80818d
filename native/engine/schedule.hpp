// The schedule: an agreed sequence of entries (chunks) that every rank carries out in the same order.
//
// Tensors that all ranks have announced wait in a heap by priority. Whichever rank first needs to know what comes next
// takes the tensor on top, and publishes its next chunk as the next entry: so the choice is made anew after every
// chunk, a tensor of higher priority overtakes at the next chunk, and no coordinator is needed. Small tensors that
// stand on top of the heap together are fused into one entry. Tensors on devices have a heap of their own: the next
// batch is made when the devices of all ranks have begun the last one, and takes what has come meanwhile. (Priority and
// partitioning as in P3, Jayarajan et al. 2019, and ByteScheduler, Peng et al. 2019.)
#pragma once

#include <cstdint>

#include "shm/world.hpp"

namespace kvstore_hvd {

class Schedule {
 public:
  Schedule(World& world, Alarm& alarm) : world_(world), alarm_(alarm) {}

  // Puts a slot that all ranks have announced into the heap. Throws WorldLost.
  void make_ready(std::uint32_t slot, std::int32_t priority);

  // Whether entry `index` exists or could be made.
  bool available(std::uint32_t index) const;

  // Whether entry `index` exists. Acquire: see fetch().
  bool is_decided(std::uint32_t index) const { return world_.head.load(std::memory_order_acquire) != index; }

  // Entries are counted modulo 2^32 here.
  //
  // Copies entry `index` to `entry`, deciding it first if no rank has. Returns false when there is nothing to schedule.
  // A rank must ask for 0, 1, 2, ... and may ask for `index` only when every rank has reduced entry index - kEntries.
  // Throws WorldLost.
  bool fetch(std::uint32_t index, Entry& entry);

 private:
  // The heap from which the next tensor comes; none when there is nothing to schedule.
  ReadyHeap* next_heap();
  bool devices_have_room() const;
  void decide(Entry& entry, ReadyHeap& heap);
  // Takes the tensor on top of the heap, and more that a device can carry out with it.
  void decide_on_device(Entry& entry, std::uint32_t& count);

  World& world_;
  Alarm& alarm_;
};

// How a chunk is cut from a tensor: by size and number of ranks. See docs/architecture.md.
struct ChunkPlan {
  Algorithm algorithm;
  std::uint64_t bytes;
  std::uint64_t part = 0;  // kDirect: bytes claimed at a time
};
ChunkPlan plan_chunk(const Thresholds& thresholds, Collective collective, bool direct, std::uint64_t tensor_bytes,
                     std::uint32_t ranks, std::uint32_t stage_bytes);

}  // namespace kvstore_hvd
