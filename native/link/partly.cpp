#include "link/partly.hpp"

#include <algorithm>

#include "shm/wait.hpp"

namespace kvstore_hvd {

std::vector<PartlyAnnounced> partly_announced(World& world, std::size_t most) {
  std::vector<PartlyAnnounced> found;
  std::vector<std::uint32_t> places;
  const std::uint32_t used = world.slots_used.load(std::memory_order_relaxed);
  for (std::uint32_t slot = 0; slot < used && found.size() < most; ++slot) {
    // See Slot::state; relaxed, as all here.
    const std::uint64_t announced = world.slots[slot].state.load(std::memory_order_relaxed) & 0x7fff;
    if (announced == 0 || announced >= static_cast<std::uint64_t>(world.ranks)) continue;
    const auto count_of = [&](int r) { return world.mark(slot, r).announced.load(std::memory_order_relaxed); };
    std::uint32_t first = count_of(0);
    for (int r = 1; r < world.ranks; ++r) {
      if (static_cast<std::int32_t>(count_of(r) - first) > 0) first = count_of(r);
    }
    PartlyAnnounced one;
    for (int r = 0; r < world.ranks; ++r) {
      if (count_of(r) != first) one.late.push_back(r);
    }
    if (one.late.empty()) continue;
    found.push_back(std::move(one));
    places.push_back(slot);
  }
  if (found.empty()) return found;
  const SharedLockGuard guard(world.table_lock, world.ranks, std::try_to_lock);
  if (!guard.owns_lock()) return {};
  for (std::size_t i = 0; i < places.size(); ++i) {
    const Slot& slot = world.slots[places[i]];
    found[i].name.assign(slot.name, slot.name_length);
  }
  return found;
}

}  // namespace kvstore_hvd
