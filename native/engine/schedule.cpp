#include "engine/schedule.hpp"

#include <algorithm>
#include <cstring>

namespace kvstore_hvd {
namespace {

constexpr std::uint64_t kAlignment = 64;  // of pieces in staging memory: a cache line, and a multiple of every element

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Lower runs later.
bool runs_before(const Ready& a, const Ready& b) {
  if (a.priority != b.priority) return a.priority > b.priority;
  return static_cast<std::int32_t>(a.order - b.order) < 0;
}
// For the heap functions of the standard library, which keep the greatest on top.
bool heap_less(const Ready& a, const Ready& b) { return runs_before(b, a); }

void pop(ReadyHeap& heap, std::uint32_t& count) {
  std::pop_heap(heap.tensors, heap.tensors + count, heap_less);
  --count;
}

}  // namespace

ChunkPlan plan_chunk(const Thresholds& thresholds, Collective collective, bool direct, std::uint64_t tensor_bytes,
                     std::uint32_t ranks, std::uint64_t stage_bytes) {
  constexpr std::uint64_t kMinSlice = 4096;
  const std::uint64_t plain_chunk = std::min<std::uint64_t>(stage_bytes, thresholds.broadcast_chunk);
  if (collective == Collective::kBroadcast) return {Algorithm::kBroadcast, plain_chunk};
  if (collective == Collective::kExchange) return {Algorithm::kExchange, plain_chunk};
  if (collective == Collective::kReduceScatter) return {Algorithm::kReduceScatter, plain_chunk};
  if (direct) {
    const std::uint64_t chunk = std::min<std::uint64_t>(tensor_bytes, thresholds.direct_chunk);
    const std::uint64_t share = round_up(chunk / ranks, kMinSlice);
    return {Algorithm::kDirect, thresholds.direct_chunk,
            std::clamp<std::uint64_t>(share, thresholds.min_part, thresholds.max_part)};
  }
  if (tensor_bytes <= thresholds.one_shot) return {Algorithm::kOneShot, stage_bytes};
  // Four chunks keep the three stages of the pipeline busy; a slice must be worth its synchronisation.
  const std::uint64_t largest = tensor_bytes >= thresholds.large ? thresholds.max_slice_large : thresholds.max_slice;
  const std::uint64_t smallest = std::min(round_up(thresholds.min_chunk / ranks, kMinSlice), largest);
  const std::uint64_t slice = std::clamp(round_up(tensor_bytes / ranks / 4, kMinSlice), smallest, largest);
  // Both are multiples of kAlignment, so no element is cut.
  return {Algorithm::kTwoShot, std::min<std::uint64_t>(slice * ranks, stage_bytes)};
}

ChunkPlan plan_link_chunk(Collective collective, std::uint64_t tensor_bytes, std::uint64_t largest) {
  if (collective == Collective::kBroadcast) return {Algorithm::kLinkBroadcast, largest};
  if (collective == Collective::kExchange) return {Algorithm::kLinkExchange, largest};
  // A chunk costs messages, and while it is between the hosts the next one is reduced.
  constexpr std::uint64_t kSmallest = std::uint64_t{256} << 10;
  const std::uint64_t chunk = std::max(round_up(tensor_bytes / 4, kAlignment), kSmallest);
  return {Algorithm::kLinkSum, std::min(chunk, largest)};
}

// Of the bytes of one rank, so that those of all that lie in one memory fit in.
std::uint64_t Schedule::largest_chunk(Collective collective) const {
  if (!world_.has_link()) return world_.layout.stage_bytes;
  int parts = 4;  // this host's sum, the result, and the sums of the other hosts; see LinkChunks
  if (collective == Collective::kBroadcast) parts = 1;
  if (collective == Collective::kExchange) parts = world_.size;
  const std::uint64_t share = world_.layout.link_bytes / static_cast<std::uint64_t>(parts) / kAlignment * kAlignment;
  return std::min<std::uint64_t>(share, world_.layout.stage_bytes);
}

void Schedule::add(std::uint32_t slot, std::int32_t priority) {
  const Slot& which = world_.slots[slot];
  // What failed has nothing to do on a device.
  ReadyHeap& heap = which.error == 0 && which.agreed.on_device != 0 ? world_.ready_on_device : world_.ready;
  // Relaxed: written under the lock.
  const std::uint32_t count = heap.count.load(std::memory_order_relaxed);
  heap.tensors[count] = Ready{priority, world_.next_order++, slot};
  std::push_heap(heap.tensors, heap.tensors + count + 1, heap_less);
  // Sequentially consistent, see available().
  heap.count.store(count + 1, std::memory_order_seq_cst);
}

// Room: the devices of all ranks have begun all batches so far.
bool Schedule::devices_have_tensors_and_room() const {
  // Sequentially consistent, all: see available() and DeviceQueue::take().
  if (world_.ready_on_device.count.load(std::memory_order_seq_cst) == 0) return false;
  const std::uint32_t begun = world_.rank(0).batches_begun.load(std::memory_order_seq_cst);
  for (int r = 1; r < world_.ranks; ++r) {
    if (world_.rank(r).batches_begun.load(std::memory_order_seq_cst) != begun) return false;
  }
  // Relaxed, and last: a rank that has begun an entry has seen it published, and with it the count.
  return world_.device_entries.load(std::memory_order_relaxed) == begun;
}

ReadyHeap* Schedule::next_heap() {
  // Relaxed, both: written under the lock.
  ReadyHeap* const here = world_.ready.count.load(std::memory_order_relaxed) != 0 ? &world_.ready : nullptr;
  ReadyHeap& there = world_.ready_on_device;
  if (!devices_have_tensors_and_room()) return here;
  return here == nullptr || runs_before(there.tensors[0], here->tensors[0]) ? &there : here;
}

std::optional<Schedule::Decision> Schedule::decide(Entry& entry) {
  ReadyHeap* const heap = next_heap();
  if (heap == nullptr) return std::nullopt;
  std::uint32_t count = heap->count.load(std::memory_order_relaxed);  // Relaxed: written under the lock.
  entry.n_pieces = 0;
  entry.staged_bytes = 0;
  entry.root = 0;
  const std::uint32_t first = heap->tensors[0].slot;
  if (world_.slots[first].error != 0) {
    entry.algorithm = Algorithm::kFail;
    entry.pieces[entry.n_pieces++] = Piece{first, 0, 0, 0};
    pop(*heap, count);
  } else if (heap == &world_.ready_on_device) {
    take_batch(entry, *heap, count);
  } else {
    take_chunk(entry, *heap, count);
  }
  return Decision{heap, count};
}

bool Schedule::follow(const Entry& entry) {
  const Signature& first = world_.slots[entry.pieces[0].slot].agreed;
  const bool is_batch = first.on_device != 0;
  const Algorithm algorithm = is_batch ? Algorithm::kDevice : plan_link_chunk(first.collective, 0, 0).algorithm;
  if (entry.algorithm != algorithm || entry.root != first.root) return false;
  std::uint64_t staged = 0;
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const Piece& piece = entry.pieces[i];
    Slot& slot = world_.slots[piece.slot];
    const Signature& agreed = slot.agreed;
    if (agreed.collective != first.collective || agreed.root != first.root || agreed.on_device != first.on_device ||
        world_.is_narrow_on_link(agreed) != world_.is_narrow_on_link(first)) {
      return false;
    }
    if (piece.staged != staged || piece.offset != slot.scheduled || piece.bytes > slot.bytes - slot.scheduled) {
      return false;
    }
    const auto is_it = [&](const Piece& other) { return other.slot == piece.slot; };
    if (piece.bytes == 0 && (slot.bytes != 0 || std::any_of(entry.pieces, entry.pieces + i, is_it))) return false;
    slot.scheduled += piece.bytes;
    if (!is_batch) staged += round_up(piece.bytes, kAlignment);
    if (slot.scheduled < slot.bytes && slot.scheduled % kAlignment != 0) return false;
  }
  return entry.staged_bytes == staged && (is_batch || staged <= largest_chunk(first.collective));
}

void Schedule::take_chunk(Entry& entry, ReadyHeap& heap, std::uint32_t& count) {
  const auto add = [&](std::uint32_t index, std::uint64_t bytes) {
    Slot& slot = world_.slots[index];
    entry.pieces[entry.n_pieces++] = Piece{index, entry.staged_bytes, slot.scheduled, bytes};
    slot.scheduled += bytes;
    entry.staged_bytes += static_cast<std::uint32_t>(round_up(bytes, kAlignment));
    if (slot.scheduled == slot.bytes) pop(heap, count);
  };
  const std::uint32_t first = heap.tensors[0].slot;
  const Slot& slot = world_.slots[first];
  const Signature& agreed = slot.agreed;
  const std::uint64_t largest = largest_chunk(agreed.collective);
  const auto plan = [&](std::uint64_t bytes) {
    if (world_.has_link()) return plan_link_chunk(agreed.collective, bytes, largest);
    return plan_chunk(world_.thresholds, agreed.collective, slot.direct != 0, bytes,
                      static_cast<std::uint32_t>(world_.ranks), world_.layout.stage_bytes);
  };
  entry.root = agreed.root;
  add(first, std::min(plan(slot.bytes).bytes, slot.bytes - slot.scheduled));
  // Whole small tensors that come next anyway ride along with the end of this one.
  while (slot.scheduled == slot.bytes && count > 0 && entry.n_pieces < kPieces) {
    const std::uint32_t next = heap.tensors[0].slot;
    const Slot& other = world_.slots[next];
    const std::uint64_t rest = other.bytes - other.scheduled;
    if (other.error != 0 || other.agreed.collective != agreed.collective || other.agreed.root != agreed.root ||
        other.direct != slot.direct || world_.is_narrow_on_link(other.agreed) != world_.is_narrow_on_link(agreed) ||
        entry.staged_bytes + round_up(rest, kAlignment) > largest / 2) {
      break;
    }
    add(next, rest);
  }
  const ChunkPlan fused = plan(entry.staged_bytes);
  entry.algorithm = fused.algorithm;
  entry.part_bytes = static_cast<std::uint32_t>(fused.part);
}

void Schedule::take_batch(Entry& entry, ReadyHeap& heap, std::uint32_t& count) {
  const Slot& first = world_.slots[heap.tensors[0].slot];
  const auto goes_with_it = [&](const Slot& slot) {
    const Signature &a = slot.agreed, &b = first.agreed;
    return a.collective == b.collective && a.dtype == b.dtype && a.op == b.op && a.as_half == b.as_half &&
           a.root == b.root && a.prescale == b.prescale && a.postscale == b.postscale && slot.weights == first.weights;
  };
  entry.algorithm = Algorithm::kDevice;
  entry.root = first.agreed.root;
  std::uint64_t bytes = 0;
  do {
    const std::uint32_t index = heap.tensors[0].slot;
    Slot& slot = world_.slots[index];
    if (entry.n_pieces > 0 && (!goes_with_it(slot) || bytes + slot.bytes > world_.thresholds.device_fusion)) return;
    entry.pieces[entry.n_pieces++] = Piece{index, 0, 0, slot.bytes};
    slot.scheduled = slot.bytes;
    bytes += slot.bytes;
    pop(heap, count);
  } while (count > 0 && entry.n_pieces < kPieces);
}

void Schedule::make_ready(std::uint32_t slot, std::int32_t priority) {
  const SharedLockGuard guard(world_.schedule_lock, alarm_);
  add(slot, priority);
}

bool Schedule::available(std::uint32_t index) const {
  if (world_.has_link()) return is_published(index);  // it decides for all ranks of this host
  // The rank that decides an entry publishes it before it takes its tensors off the count; so a rank that sees no
  // tensor, and then no entry, has seen all there is, in this order and with one total order of these accesses. Who has
  // looked at its bell before would see so with acquire and release, too.
  return world_.ready.count.load(std::memory_order_seq_cst) != 0 || devices_have_tensors_and_room() ||
         world_.head.load(std::memory_order_seq_cst) != index;
}

bool Schedule::fetch(std::uint32_t index, Entry& entry) {
  if (!available(index)) return false;
  if (!is_published(index)) {
    const SharedLockGuard guard(world_.schedule_lock, alarm_);
    // Otherwise another rank has been quicker. Relaxed: written under the lock.
    if (world_.head.load(std::memory_order_relaxed) == index) {
      const auto decision = decide(next_entry(world_));
      if (!decision) return false;
      publish_entry(world_);
      remove(*decision);
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

}  // namespace kvstore_hvd
