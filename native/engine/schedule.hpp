// The schedule: an agreed sequence of entries (chunks) that every rank carries out in the same order.
//
// Tensors that all ranks have announced wait in a heap, by priority. Whichever rank first needs the next entry decides
// and publishes it, once: no coordinator is needed. Over hosts the link does so, for all ranks of its host. The choice
// is made anew for every entry, so a tensor of higher priority overtakes at the next chunk; small tensors on top of the
// heap together are fused into one entry. Tensors on devices have a heap of their own, from which a batch is taken.
// (Priority and partitioning as in P3, Jayarajan et al. 2019, and ByteScheduler, Peng et al. 2019.)
//
// Entries are counted modulo 2^32 here. Memory holds kEntries of them, used in turn.
#pragma once

#include "shm/world.hpp"

namespace kvstore_hvd {

// How a chunk is cut from a tensor: by size and number of ranks. See docs/architecture.md.
struct ChunkPlan {
  Algorithm algorithm;
  std::uint64_t bytes;
  std::uint64_t part = 0;  // kDirect: bytes claimed at a time
};
ChunkPlan plan_chunk(const Thresholds& thresholds, Collective collective, bool direct, std::uint64_t tensor_bytes,
                     std::uint32_t ranks, std::uint64_t stage_bytes);
// The same over hosts, where `largest` is what fits into the link's memory.
ChunkPlan plan_link_chunk(Collective collective, std::uint64_t tensor_bytes, std::uint64_t largest);

class Schedule {
 public:
  Schedule(World& world, Alarm& alarm) : world_(world), alarm_(alarm) {}

  // ---- Any rank, without the schedule_lock ----

  // Adds a slot that all ranks have announced. Throws WorldLost.
  void make_ready(std::uint32_t slot, std::int32_t priority);

  // Whether entry `index` exists or could be made.
  bool available(std::uint32_t index) const;

  // Whether entry `index` exists. Acquire: it can be read.
  bool is_published(std::uint32_t index) const { return world_.head.load(std::memory_order_acquire) != index; }

  // Copies entry `index` to `entry`, deciding it first if no rank has. Returns false when there is none. A rank must
  // ask for 0, 1, 2, ..., and for `index` only when every rank has reduced entry index - kEntries. Throws WorldLost.
  bool fetch(std::uint32_t index, Entry& entry);

  // ---- The holder of the world's schedule_lock, or its link ----

  void add(std::uint32_t slot, std::int32_t priority);

  // Fills in the next entry, from devices only while they have room. Its tensors stay in the count of their heap until
  // remove(), which comes after the entry is published: see available().
  struct Decision {
    ReadyHeap* heap;
    std::uint32_t left;  // how many tensors stay in it
  };
  std::optional<Decision> decide(Entry& entry);
  static void remove(const Decision& decision) { decision.heap->count.store(decision.left, std::memory_order_seq_cst); }

  // Whether the entry, which another host has decided, continues its tensors as they are agreed on, and fits into
  // the memory of a chunk; if so, counts its bytes as scheduled.
  bool follow(const Entry& entry);

 private:
  bool devices_have_tensors_and_room() const;
  std::uint64_t largest_chunk(Collective collective) const;
  ReadyHeap* next_heap();
  // Each takes the tensor on top of its heap, and more that can be carried out with it.
  void take_chunk(Entry& entry, ReadyHeap& heap, std::uint32_t& count);
  void take_batch(Entry& entry, ReadyHeap& heap, std::uint32_t& count);

  World& world_;
  Alarm& alarm_;
};

// For the holder of the schedule_lock, or the link: the place of the entry that is published next (every rank has
// reduced the one that was there before), and its publication.
Entry& next_entry(World& world);
void publish_entry(World& world);

}  // namespace kvstore_hvd
