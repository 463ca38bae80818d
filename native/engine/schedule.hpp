// The schedule: an agreed sequence of entries (chunks) that every rank carries out in the same order.
//
// Whichever rank first needs to know what comes next takes it from the agenda and publishes it, once: no coordinator is
// needed. Over hosts the link does so, for all ranks of its host. Entries are counted modulo 2^32 here. Memory holds
// kEntries of them, used in turn.
#pragma once

#include <cstdint>

#include "engine/agenda.hpp"
#include "shm/alarm.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

class Schedule {
 public:
  Schedule(World& world, Alarm& alarm) : world_(world), alarm_(alarm), agenda_(world) {}

  // Puts a slot that all ranks have announced on the agenda. Throws WorldLost.
  void make_ready(std::uint32_t slot, std::int32_t priority);

  // Whether entry `index` exists or could be made.
  bool available(std::uint32_t index) const;

  // Whether entry `index` exists. Acquire: it can be read.
  bool is_published(std::uint32_t index) const { return world_.head.load(std::memory_order_acquire) != index; }

  // Copies entry `index` to `entry`, deciding it first if no rank has. Returns false when there is nothing to schedule.
  // A rank must ask for 0, 1, 2, ... and may ask for `index` only when every rank has reduced entry index - kEntries.
  // Throws WorldLost.
  bool fetch(std::uint32_t index, Entry& entry);

 private:
  World& world_;
  Alarm& alarm_;
  Agenda agenda_;
};

// For whoever holds the world's schedule_lock, or is its link: the place of the entry that is published next (every
// rank has reduced the one that was there before), and its publication.
Entry& next_entry(World& world);
void publish_entry(World& world);

// Whether the devices of all ranks have begun all batches so far. Without the lock.
bool devices_have_room(World& world);

}  // namespace kvstore_hvd
