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

}  // namespace

ChunkPlan plan_chunk(const Thresholds& thresholds, Collective collective, bool direct, std::uint64_t tensor_bytes,
                     std::uint32_t ranks, std::uint32_t stage_bytes) {
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
  // Four chunks keep the three stages of the pipeline busy; small tensors are cut no finer than a slice worth its
  // synchronisation.
  const std::uint64_t largest = tensor_bytes >= thresholds.large ? thresholds.max_slice_large : thresholds.max_slice;
  const std::uint64_t smallest = std::min(round_up(thresholds.min_chunk / ranks, kMinSlice), largest);
  const std::uint64_t slice = std::clamp(round_up(tensor_bytes / ranks / 4, kMinSlice), smallest, largest);
  // Both are multiples of kAlignment, so no element is cut.
  return {Algorithm::kTwoShot, std::min<std::uint64_t>(slice * ranks, stage_bytes)};
}

void Schedule::make_ready(std::uint32_t slot, std::int32_t priority) {
  const SharedLockGuard guard(world_.schedule_lock, alarm_);
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

bool Schedule::available(std::uint32_t index) const {
  // Whoever decides an entry publishes it before it takes its tensors off the count; so a rank that sees no tensor, and
  // then no entry, has seen all there is, in this order and with one total order of these accesses.
  return world_.ready.count.load(std::memory_order_seq_cst) != 0 ||
         (world_.ready_on_device.count.load(std::memory_order_seq_cst) != 0 && devices_have_room()) ||
         world_.head.load(std::memory_order_seq_cst) != index;
}

bool Schedule::devices_have_room() const {
  // Sequentially consistent, both: see DeviceQueue::take().
  const std::uint32_t begun = world_.rank(0).batches_begun.load(std::memory_order_seq_cst);
  for (int r = 1; r < static_cast<int>(world_.size); ++r) {
    if (world_.rank(r).batches_begun.load(std::memory_order_seq_cst) != begun) return false;
  }
  // Relaxed, and last: whoever has begun an entry has seen it published, and with it the count, which is never older.
  return world_.device_entries.load(std::memory_order_relaxed) == begun;
}

ReadyHeap* Schedule::next_heap() {
  // Relaxed, both: written under the lock.
  ReadyHeap* const here = world_.ready.count.load(std::memory_order_relaxed) != 0 ? &world_.ready : nullptr;
  ReadyHeap& there = world_.ready_on_device;
  if (there.count.load(std::memory_order_relaxed) == 0 || !devices_have_room()) return here;
  return here == nullptr || runs_before(there.tensors[0], here->tensors[0]) ? &there : here;
}

bool Schedule::fetch(std::uint32_t index, Entry& entry) {
  if (!available(index)) return false;
  Entry& shared = world_.entries[index % kEntries];
  // Acquire: the entry is complete once it is published.
  if (!is_decided(index)) {
    const SharedLockGuard guard(world_.schedule_lock, alarm_);
    // Relaxed, both: written under the lock. Another rank may have been quicker.
    if (world_.head.load(std::memory_order_relaxed) == index) {
      ReadyHeap* const heap = next_heap();
      if (heap == nullptr) return false;
      decide(shared, *heap);
    }
  }
  std::memcpy(&entry, &shared, offsetof(Entry, pieces));
  std::memcpy(entry.pieces, shared.pieces, entry.n_pieces * sizeof(Piece));
  return true;
}

void Schedule::decide_on_device(Entry& entry, std::uint32_t& count) {
  ReadyHeap& heap = world_.ready_on_device;
  const Slot& first = world_.slots[heap.tensors[0].slot];
  const auto goes_with_it = [&](const Slot& slot) {
    const Signature &a = slot.agreed, &b = first.agreed;
    return a.collective == b.collective && a.dtype == b.dtype && a.op == b.op && a.as_half == b.as_half &&
           a.root == b.root && a.prescale == b.prescale && a.postscale == b.postscale && slot.weights == first.weights;
  };
  // Relaxed: under the lock; published with the entry.
  world_.device_entries.store(world_.device_entries.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
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
    std::pop_heap(heap.tensors, heap.tensors + count, heap_less);
    --count;
  } while (count > 0 && entry.n_pieces < kPieces);
}

void Schedule::decide(Entry& entry, ReadyHeap& heap) {
  std::uint32_t count = heap.count.load(std::memory_order_relaxed);  // Relaxed: written under the lock.
  entry.n_pieces = 0;
  entry.staged_bytes = 0;
  entry.root = 0;

  const auto pop = [&] {
    std::pop_heap(heap.tensors, heap.tensors + count, heap_less);
    --count;
  };
  const auto add = [&](std::uint32_t index, std::uint64_t bytes) {
    Slot& slot = world_.slots[index];
    entry.pieces[entry.n_pieces++] = Piece{index, entry.staged_bytes, slot.scheduled, bytes};
    slot.scheduled += bytes;
    entry.staged_bytes += static_cast<std::uint32_t>(round_up(bytes, kAlignment));
    if (slot.scheduled == slot.bytes) pop();
  };

  const std::uint32_t first = heap.tensors[0].slot;
  const Slot& slot = world_.slots[first];
  if (slot.error != 0) {
    entry.algorithm = Algorithm::kFail;
    entry.pieces[entry.n_pieces++] = Piece{first, 0, 0, 0};
    pop();
  } else if (&heap == &world_.ready_on_device) {
    decide_on_device(entry, count);
  } else {
    const Signature& agreed = slot.agreed;
    const bool direct = slot.direct != 0;
    const ChunkPlan plan =
        plan_chunk(world_.thresholds, agreed.collective, direct, slot.bytes, world_.size, world_.stage_bytes);
    entry.root = agreed.root;
    add(first, std::min(plan.bytes, slot.bytes - slot.scheduled));
    // Whole small tensors that come next anyway ride along with the end of this one.
    while (slot.scheduled == slot.bytes && count > 0 && entry.n_pieces < kPieces) {
      const std::uint32_t next = heap.tensors[0].slot;
      const Slot& other = world_.slots[next];
      const std::uint64_t rest = other.bytes - other.scheduled;
      if (other.error != 0 || other.agreed.collective != agreed.collective || other.agreed.root != agreed.root ||
          other.direct != slot.direct || entry.staged_bytes + round_up(rest, kAlignment) > world_.stage_bytes / 2) {
        break;
      }
      add(next, rest);
    }
    const ChunkPlan fused =
        plan_chunk(world_.thresholds, agreed.collective, direct, entry.staged_bytes, world_.size, world_.stage_bytes);
    entry.algorithm = fused.algorithm;
    entry.part_bytes = static_cast<std::uint32_t>(fused.part);
    if (direct) {
      const std::uint32_t index = world_.head.load(std::memory_order_relaxed);  // as above: under the lock
      Claims& claims = world_.claims[index % kEntries];
      // Not reached, however long ago it was last posted: that is done for direct entries only, and the count wraps.
      claims.finished.post(index);
      // Relaxed, both: published with the entry. No rank is still busy with the entry that used them before.
      claims.next.store(0, std::memory_order_relaxed);
      claims.done.store(0, std::memory_order_relaxed);
    }
  }

  // Published before it leaves the count: see available(). (The load is relaxed: written under the lock.)
  world_.head.store(world_.head.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
  heap.count.store(count, std::memory_order_seq_cst);
}

}  // namespace kvstore_hvd
