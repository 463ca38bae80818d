// The log: the entries of the schedule, published once and read by every rank in the same order.
//
// Entries are counted modulo 2^32 here. Memory holds kEntries of them, used in turn.
#pragma once

#include <cstdint>

#include "shm/world.hpp"

namespace kvstore_hvd {

class ScheduleLog {
 public:
  explicit ScheduleLog(World& world) : world_(world) {}

  // Whether entry `index` exists. Acquire: read() may follow.
  bool is_published(std::uint32_t index) const { return world_.head.load(std::memory_order_acquire) != index; }
  // As is_published(), in one total order with the counts of the agenda.
  bool is_published_in_order(std::uint32_t index) const { return world_.head.load(std::memory_order_seq_cst) != index; }

  void read(std::uint32_t index, Entry& entry) const;

  // Whether the devices of all ranks have begun all batches so far. Without the lock.
  bool devices_have_room() const;

  // For whoever holds the world's schedule_lock: the number and the place of the entry to be published next. Every rank
  // has reduced the one that was there before.
  std::uint32_t next() const {
    return world_.head.load(std::memory_order_relaxed);
  }  // Relaxed: written under the lock.
  Entry& next_entry() { return world_.entries[next() % kEntries]; }
  void publish();

 private:
  World& world_;
};

}  // namespace kvstore_hvd
