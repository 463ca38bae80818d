#include "engine/schedule_log.hpp"

#include <cstddef>
#include <cstring>

namespace kvstore_hvd {

void ScheduleLog::read(std::uint32_t index, Entry& entry) const {
  const Entry& shared = world_.entries[index % kEntries];
  std::memcpy(&entry, &shared, offsetof(Entry, pieces));
  std::memcpy(entry.pieces, shared.pieces, entry.n_pieces * sizeof(Piece));
}

bool ScheduleLog::devices_have_room() const {
  // Sequentially consistent, both: see DeviceQueue::take().
  const std::uint32_t begun = world_.rank(0).batches_begun.load(std::memory_order_seq_cst);
  for (int r = 1; r < world_.ranks; ++r) {
    if (world_.rank(r).batches_begun.load(std::memory_order_seq_cst) != begun) return false;
  }
  // Relaxed, and last: whoever has begun an entry has seen it published, and with it the count, which is never older.
  return world_.device_entries.load(std::memory_order_relaxed) == begun;
}

void ScheduleLog::publish() {
  const std::uint32_t index = next();
  const Algorithm algorithm = next_entry().algorithm;
  if (algorithm == Algorithm::kDirect) {
    Claims& claims = world_.claims[index % kEntries];
    // Not reached, however long ago it was last posted: that is done for direct entries only, and the count wraps.
    claims.finished.post(index);
    // Relaxed, both: published with the entry. No rank is still busy with the entry that used them before.
    claims.next.store(0, std::memory_order_relaxed);
    claims.done.store(0, std::memory_order_relaxed);
  } else if (algorithm == Algorithm::kDevice) {
    // Relaxed: under the lock; published with the entry.
    world_.device_entries.store(world_.device_entries.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  world_.head.store(index + 1, std::memory_order_seq_cst);
}

}  // namespace kvstore_hvd
