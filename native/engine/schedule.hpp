// The schedule: an agreed sequence of entries (chunks) that every rank carries out in the same order.
//
// Whichever rank first needs to know what comes next takes it from the agenda and publishes it in the log: no
// coordinator is needed.
#pragma once

#include <cstdint>

#include "engine/agenda.hpp"
#include "engine/schedule_log.hpp"
#include "shm/alarm.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

class Schedule {
 public:
  Schedule(World& world, Alarm& alarm) : world_(world), alarm_(alarm), agenda_(world), log_(world) {}

  // Puts a slot that all ranks have announced on the agenda. Throws WorldLost.
  void make_ready(std::uint32_t slot, std::int32_t priority);

  // Whether entry `index` exists or could be made.
  bool available(std::uint32_t index) const;

  // Whether entry `index` exists.
  bool is_published(std::uint32_t index) const { return log_.is_published(index); }

  // Copies entry `index` (modulo 2^32) to `entry`, deciding it first if no rank has. Returns false when there is
  // nothing to schedule. A rank must ask for 0, 1, 2, ... and may ask for `index` only when every rank has reduced
  // entry index - kEntries. Throws WorldLost.
  bool fetch(std::uint32_t index, Entry& entry);

 private:
  World& world_;
  Alarm& alarm_;
  Agenda agenda_;
  ScheduleLog log_;
};

}  // namespace kvstore_hvd
