// The agenda: tensors that all ranks have announced, by priority, and what is done next with them.
//
// The choice is made anew for every entry of the schedule, so a tensor of higher priority overtakes at the next chunk.
// Small tensors that stand on top of the heap together are fused into one entry. Tensors on devices have a heap of
// their own, from which a batch is taken. (Priority and partitioning as in P3, Jayarajan et al. 2019, and
// ByteScheduler, Peng et al. 2019.)
#pragma once

#include <cstdint>
#include <optional>

#include "shm/world.hpp"

namespace kvstore_hvd {

// How a chunk is cut from a tensor: by size and number of ranks. See docs/architecture.md.
struct ChunkPlan {
  Algorithm algorithm;
  std::uint64_t bytes;
  std::uint64_t part = 0;  // kDirect: bytes claimed at a time
};
ChunkPlan plan_chunk(const Thresholds& thresholds, Collective collective, bool direct, std::uint64_t tensor_bytes,
                     std::uint32_t ranks, std::uint32_t stage_bytes);
// The same over hosts, where `largest` is what fits into the link's memory.
ChunkPlan plan_link_chunk(Collective collective, std::uint64_t tensor_bytes, std::uint64_t largest);

// For whoever holds the world's schedule_lock, unless a member says otherwise.
class Agenda {
 public:
  explicit Agenda(World& world) : world_(world) {}

  void add(std::uint32_t slot, std::int32_t priority);

  // Whether there is something to decide about: tensors, and tensors on devices. Any thread, without the lock;
  // sequentially consistent, see Schedule::available().
  bool has_tensors() const { return world_.ready.count.load(std::memory_order_seq_cst) != 0; }
  bool has_device_tensors() const { return world_.ready_on_device.count.load(std::memory_order_seq_cst) != 0; }

  // Fills in what comes next, from devices only if they have room. What was taken for it stays in the count of its heap
  // until remove(), which comes after the entry is published: see Schedule::available().
  struct Decision {
    ReadyHeap* heap;
    std::uint32_t left;  // how many tensors stay in it
  };
  std::optional<Decision> decide(Entry& entry, bool devices_have_room);
  static void remove(const Decision& decision) { decision.heap->count.store(decision.left, std::memory_order_seq_cst); }

  // Whether the entry, which another host has decided, goes on with its tensors as they are agreed on, and fits into
  // the memory of a chunk; takes note of it then.
  bool follow(const Entry& entry);

 private:
  std::uint64_t largest_chunk(Collective collective) const;
  ReadyHeap* next_heap(bool devices_have_room);
  // Each takes the tensor on top of its heap, and more that can be carried out with it.
  void take_chunk(Entry& entry, ReadyHeap& heap, std::uint32_t& count);
  void take_batch(Entry& entry, ReadyHeap& heap, std::uint32_t& count);

  World& world_;
};

}  // namespace kvstore_hvd
