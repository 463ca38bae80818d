#include "engine/schedule.hpp"

namespace kvstore_hvd {

void Schedule::make_ready(std::uint32_t slot, std::int32_t priority) {
  const SharedLockGuard guard(world_.schedule_lock, alarm_);
  agenda_.add(slot, priority);
}

bool Schedule::available(std::uint32_t index) const {
  if (world_.has_link()) return log_.is_published(index);  // it decides for all ranks of this host
  // Whoever decides an entry publishes it before it takes its tensors off the count; so a rank that sees no tensor, and
  // then no entry, has seen all there is, in this order and with one total order of these accesses.
  return agenda_.has_tensors() || (agenda_.has_device_tensors() && log_.devices_have_room()) ||
         log_.is_published_in_order(index);
}

bool Schedule::fetch(std::uint32_t index, Entry& entry) {
  if (!available(index)) return false;
  if (!log_.is_published(index)) {
    const SharedLockGuard guard(world_.schedule_lock, alarm_);
    // Otherwise another rank has been quicker.
    if (log_.next() == index) {
      const bool devices = agenda_.has_device_tensors() && log_.devices_have_room();
      const auto decision = agenda_.decide(log_.next_entry(), devices);
      if (!decision) return false;
      log_.publish();
      Agenda::remove(*decision);
    }
  }
  log_.read(index, entry);
  return true;
}

}  // namespace kvstore_hvd
