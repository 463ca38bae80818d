#include "engine/schedule.hpp"

#include <cstddef>
#include <cstring>

namespace kvstore_hvd {

void Schedule::make_ready(std::uint32_t slot, std::int32_t priority) {
  const SharedLockGuard guard(world_.schedule_lock, alarm_);
  agenda_.add(slot, priority);
}

bool Schedule::available(std::uint32_t index) const {
  if (world_.has_link()) return is_published(index);  // it decides for all ranks of this host
  // Whoever decides an entry publishes it before it takes its tensors off the count; so a rank that sees no tensor, and
  // then no entry, has seen all there is, in this order and with one total order of these accesses.
  return agenda_.has_tensors() || (agenda_.has_device_tensors() && devices_have_room(world_)) ||
         world_.head.load(std::memory_order_seq_cst) != index;
}

bool Schedule::fetch(std::uint32_t index, Entry& entry) {
  if (!available(index)) return false;
  if (!is_published(index)) {
    const SharedLockGuard guard(world_.schedule_lock, alarm_);
    // Otherwise another rank has been quicker. Relaxed: written under the lock.
    if (world_.head.load(std::memory_order_relaxed) == index) {
      const bool devices = agenda_.has_device_tensors() && devices_have_room(world_);
      const auto decision = agenda_.decide(next_entry(world_), devices);
      if (!decision) return false;
      publish_entry(world_);
      Agenda::remove(*decision);
    }
  }
  const Entry& shared = world_.entries[index % kEntries];
  std::memcpy(&entry, &shared, offsetof(Entry, pieces));
  std::memcpy(entry.pieces, shared.pieces, entry.n_pieces * sizeof(Piece));
  return true;
}

Entry& next_entry(World& world) {
  return world.entries[world.head.load(std::memory_order_relaxed) % kEntries];  // Relaxed: written under the lock.
}

void publish_entry(World& world) {
  const std::uint32_t index = world.head.load(std::memory_order_relaxed);  // as above
  const Algorithm algorithm = next_entry(world).algorithm;
  if (algorithm == Algorithm::kDirect) {
    Claims& claims = world.claims[index % kEntries];
    // Not reached, however long ago it was last posted: that is done for direct entries only, and the count wraps.
    claims.finished.post(index);
    // Relaxed, both: published with the entry. No rank is still busy with the entry that used them before.
    claims.next.store(0, std::memory_order_relaxed);
    claims.done.store(0, std::memory_order_relaxed);
  } else if (algorithm == Algorithm::kDevice) {
    // Relaxed: under the lock; published with the entry.
    world.device_entries.store(world.device_entries.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  world.head.store(index + 1, std::memory_order_seq_cst);
}

bool devices_have_room(World& world) {
  // Sequentially consistent, both: see DeviceQueue::take().
  const std::uint32_t begun = world.rank(0).batches_begun.load(std::memory_order_seq_cst);
  for (int r = 1; r < world.ranks; ++r) {
    if (world.rank(r).batches_begun.load(std::memory_order_seq_cst) != begun) return false;
  }
  // Relaxed, and last: whoever has begun an entry has seen it published, and with it the count, which is never older.
  return world.device_entries.load(std::memory_order_relaxed) == begun;
}

}  // namespace kvstore_hvd
