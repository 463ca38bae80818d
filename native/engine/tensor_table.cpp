#include "engine/tensor_table.hpp"

#include <algorithm>
#include <cstring>
#include <functional>

namespace kvstore_hvd {
namespace {

// See Slot::state.
constexpr std::uint64_t pack(std::uint32_t version, std::uint16_t operations, std::uint16_t announced) {
  return std::uint64_t{version} << 32 | std::uint64_t{operations} << 16 | announced;
}
constexpr std::uint32_t version_of(std::uint64_t state) { return static_cast<std::uint32_t>(state >> 32); }
constexpr std::uint16_t operations_of(std::uint64_t state) { return static_cast<std::uint16_t>(state >> 16); }
constexpr std::uint64_t kAnnouncedEarly = 1 << 15;
constexpr std::uint16_t announced_of(std::uint64_t state) { return state & (kAnnouncedEarly - 1); }
constexpr bool is_under_way(std::uint64_t state) { return static_cast<std::uint16_t>(state) != 0; }
static_assert(kMaxRanks < kAnnouncedEarly);

// By the rank itself, the only one to write it. Release: what it announces was written before, see missed().
void add(std::atomic<std::uint32_t>& count, int change) {
  count.store(count.load(std::memory_order_relaxed) + static_cast<std::uint32_t>(change), std::memory_order_release);
}

// FNV-1a, 64 bits (Fowler, Noll, Vo). Of names, which are also compared byte by byte, and of signatures: those that
// differ in one byte never collide, others with a chance of about 2^-64.
std::uint64_t hash_bytes(const void* data, std::size_t bytes) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const auto* byte = static_cast<const unsigned char*>(data); bytes > 0; ++byte, --bytes) {
    hash = (hash ^ *byte) * 1099511628211ULL;
  }
  return hash;
}

void note(Announcement& announcement, std::string_view text) {
  const std::string_view shown = utf8_prefix(text, sizeof(announcement.note) - 1);
  std::memcpy(announcement.note, shown.data(), shown.size());
  announcement.note[shown.size()] = '\0';
}

std::string_view name_in(const Slot& slot) { return {slot.name, slot.name_length}; }

}  // namespace

Signature signature_of(const Request& request) {
  Signature signature;
  std::memset(&signature, 0, sizeof(signature));  // compared as bytes
  signature.collective = request.collective;
  if (!request.input_failure.empty()) {
    signature.failed = 1;
    return signature;
  }
  signature.dtype = request.dtype;
  signature.on_device = request.on_device;
  signature.count = request.count;
  signature.dims = static_cast<std::uint16_t>(request.shape.size());
  const std::size_t dims = std::min<std::size_t>(request.shape.size(), kMaxDims);
  std::copy_n(request.shape.begin(), dims, signature.shape);
  const std::size_t rest = request.shape.size() - dims;
  if (rest > 0) {
    signature.more_dims =
        static_cast<std::uint32_t>(hash_bytes(request.shape.data() + dims, rest * sizeof(std::int64_t)));
  }
  if (request.collective == Collective::kBroadcast) {
    signature.root = request.root;
    return signature;
  }
  signature.group = request.group;
  if (request.collective != Collective::kExchange) {
    signature.op = request.op;
    signature.as_half = request.as_half && can_be_half(request.dtype, request.op);
    signature.prescale = request.prescale;
    signature.postscale = request.postscale;
  }
  return signature;
}

std::optional<SlotHandle> TensorTable::find(std::string_view name, bool waits) {
  const std::uint64_t hash = hash_bytes(name.data(), name.size());
  const SharedLockGuard guard =
      waits ? SharedLockGuard(world_.table_lock, alarm_) : SharedLockGuard(world_.table_lock, rank_, std::try_to_lock);
  if (!guard.owns_lock()) return std::nullopt;
  std::uint32_t& bucket = world_.buckets[hash % kSlots];
  for (std::uint32_t link = bucket; link != 0; link = world_.slots[link - 1].next_in_bucket) {
    const Slot& slot = world_.slots[link - 1];
    // Relaxed: the version changes only under table_lock.
    if (slot.hash == hash && name_in(slot) == name) {
      return SlotHandle{link - 1, version_of(slot.state.load(std::memory_order_relaxed))};
    }
  }
  const auto taken = take_slot();
  if (!taken) return std::nullopt;
  Slot& slot = world_.slots[*taken];
  slot.hash = hash;
  slot.name_length = static_cast<std::uint32_t>(name.size());
  std::memcpy(slot.name, name.data(), name.size());
  slot.next_in_bucket = bucket;
  bucket = *taken + 1;
  return SlotHandle{*taken, version_of(slot.state.load(std::memory_order_relaxed))};
}

std::optional<std::uint32_t> TensorTable::take_slot() {
  // Relaxed, both: written under the lock. missed() may read a slot that was never announced: all zeros.
  const std::uint32_t used = world_.slots_used.load(std::memory_order_relaxed);
  if (used < kSlots) {
    world_.slots_used.store(used + 1, std::memory_order_relaxed);
    return used;
  }
  for (int tried = 0; tried < kSlots; ++tried) {
    const std::uint32_t candidate = world_.clock_hand;
    world_.clock_hand = (world_.clock_hand + 1) % kSlots;
    Slot& slot = world_.slots[candidate];
    // Acquire, both: a rank counts an announcement in its mark before it goes into `state`, so those in `state` are
    // seen to be under way; and a completed operation has read the slot before it changes hands. Every rank takes part
    // in every operation, and so knows that already; the orders cost nothing here.
    std::uint64_t state = slot.state.load(std::memory_order_acquire);
    if (is_under_way(state) || is_busy(candidate)) continue;
    // Fails when an operation was announced since, even if it is complete: `state` counts operations, modulo 2^16.
    const std::uint64_t taken = pack(version_of(state) + 1, 0, 0);
    if (!slot.state.compare_exchange_strong(state, taken, std::memory_order_acq_rel)) continue;
    unlink(candidate);
    return candidate;
  }
  return std::nullopt;
}

bool TensorTable::is_busy(std::uint32_t slot) const {
  for (int r = 0; r < world_.parties; ++r) {
    const Mark& mark = world_.mark(slot, r);
    const std::uint32_t completed = mark.completed.load(std::memory_order_acquire);
    if (mark.announced.load(std::memory_order_relaxed) != completed) return true;
  }
  return false;
}

void TensorTable::unlink(std::uint32_t slot) {
  std::uint32_t* link = &world_.buckets[world_.slots[slot].hash % kSlots];
  while (*link != slot + 1) link = &world_.slots[*link - 1].next_in_bucket;
  *link = world_.slots[slot].next_in_bucket;
}

bool TensorTable::is_current(const SlotHandle& handle) const {
  const std::atomic<std::uint64_t>& state = world_.slots[handle.slot].state;
  __builtin_prefetch(&state, 1);  // announce() is about to write to it: it need not be fetched twice
  return version_of(state.load(std::memory_order_relaxed)) == handle.version;  // Relaxed: announce() looks again
}

TensorTable::Outcome TensorTable::announce(const SlotHandle& handle, const Request& request, bool watched) {
  Slot& slot = world_.slots[handle.slot];
  const Signature signature = signature_of(request);
  Announcement& announcement = world_.announcement(handle.slot, rank_);
  Mark& own = world_.mark(handle.slot, rank_);
  if (std::memcmp(&announcement.signature, &signature, sizeof(signature)) != 0) {
    announcement.signature = signature;
    own.digest = hash_bytes(&signature, sizeof(signature));
  }
  const std::string& text = signature.failed ? request.input_failure : request.label;
  if (text != announcement.note) {
    note(announcement, text);
    // It has a name and a key: 'dense0_weight' (key 3).
    announcement.of_parameter = request.label.find("' (key ") != std::string::npos;
  }
  own.place = place_of(request);
  own.weight = request.weight;
  stage_inline(handle.slot, request, watched);
  add(own.announced, 1);

  // Relaxed, also where the exchange fails: the one that succeeds acquires. While the slot is still this name's, no
  // other rank reads what was written above.
  std::uint64_t state = slot.state.load(std::memory_order_relaxed);
  while (version_of(state) == handle.version) {
    const bool last_here = announced_of(state) + 1 == world_.ranks;
    const bool last = last_here && !world_.has_link();
    const std::uint64_t next = last ? pack(handle.version, operations_of(state) + 1, 0) : state + 1;
    // Release: publishes the announcement. Acquire: the last rank sees the announcements of all others.
    if (slot.state.compare_exchange_weak(state, next, std::memory_order_acq_rel, std::memory_order_relaxed)) {
      if (last) return decide(handle.slot, request);
      if (!last_here) return Outcome::kWaiting;
      slot.priority = request.priority;
      slot.last = rank_;
      // Release: the link sees what this rank has seen, the announcements of all.
      world_.link().inbox.put(handle.slot);
      ring_link(world_);
      return Outcome::kHere;
    }
  }
  add(own.announced, -1);
  return Outcome::kStale;
}

std::uint64_t TensorTable::place_of(const Request& request) const {
  if (request.on_device || request.collective != Collective::kAllreduce || request.inputs.size() != 1 ||
      request.outputs.size() != 1 || request.inputs[0] != request.outputs[0]) {
    return kNoPlace;
  }
  const auto array = reinterpret_cast<std::uintptr_t>(request.outputs[0]);
  const auto arena = reinterpret_cast<std::uintptr_t>(world_.arena(rank_));
  const std::uint64_t bytes = request.count * size_of(request.dtype);
  const bool inside = array >= arena && array - arena <= world_.layout.arena_bytes &&
                      bytes <= world_.layout.arena_bytes - (array - arena);
  return inside ? array - arena : kNoPlace;
}

TensorTable::Outcome TensorTable::decide(std::uint32_t index, const Request& request) {
  Slot& slot = world_.slots[index];
  // The error of the operation before; written only if needed, so that the line stays in all caches.
  if (slot.error != 0) slot.error = 0;
  const bool same = all_announced_the_same(index);
  if (same && reduce_inline(index, request)) return Outcome::kDone;
  slot.weights = world_.weights(index);
  agree(index);
  if (!same) {
    const Disagreement why = describe_disagreement(world_, announced_here(world_, index));
    disagree(index, why.code, why.text);
  }
  return Outcome::kLast;
}

bool TensorTable::all_announced_the_same(std::uint32_t slot) const {
  if (world_.announcement(slot, 0).signature.failed) return false;
  const std::uint64_t digest = world_.mark(slot, 0).digest;
  for (int r = 1; r < world_.ranks; ++r) {
    if (world_.mark(slot, r).digest != digest) return false;
  }
  return true;
}

void TensorTable::agree(std::uint32_t index) {
  Slot& slot = world_.slots[index];
  slot.agreed = world_.announcement(index, 0).signature;
  slot.bytes = slot.agreed.count * size_of(slot.agreed.dtype);
  slot.scheduled = 0;
  slot.direct = slot.bytes > 0;
  for (int r = 0; r < world_.ranks; ++r) {
    if (world_.mark(index, r).place == kNoPlace) slot.direct = 0;
  }
}

void TensorTable::disagree(std::uint32_t index, ErrorCode code, std::string_view text) {
  Slot& slot = world_.slots[index];
  slot.error = static_cast<std::uint32_t>(code);
  const std::string_view shown = utf8_prefix(text, sizeof(slot.error_text));
  slot.error_length = static_cast<std::uint32_t>(shown.size());
  std::memcpy(slot.error_text, shown.data(), shown.size());
}

void TensorTable::agree_over_hosts(std::uint32_t index, double weights) {
  Slot& slot = world_.slots[index];
  slot.error = 0;
  slot.weights = weights;
  agree(index);
}

void TensorTable::close_operation(std::uint32_t slot) {
  Mark& own = world_.mark(slot, world_.ranks);
  std::atomic<std::uint64_t>& state = world_.slots[slot].state;
  // Relaxed: no other party writes to it while all ranks have announced. Release: publishes what was agreed.
  const std::uint64_t now = state.load(std::memory_order_relaxed);
  if ((now & kAnnouncedEarly) == 0) add(own.announced, 1);
  add(own.completed, 1);  // the link looks at the slot no more than the ranks do
  std::atomic<std::uint64_t>* const late = world_.late(slot);
  for (std::uint64_t i = 0; i < world_.layout.late_words; ++i)
    late[i].store(0, std::memory_order_relaxed);  // for messages
  state.store(pack(version_of(now), operations_of(now) + 1, 0), std::memory_order_release);
}

std::optional<std::uint32_t> TensorTable::announce_early(std::string_view name, const Announcement& announcement) {
  for (;;) {
    const auto found = find(name, false);  // a stopped rank may have the lock
    if (!found) return std::nullopt;
    Mark& own = world_.mark(found->slot, world_.ranks);
    std::atomic<std::uint64_t>& shared = world_.slots[found->slot].state;
    std::uint64_t state = shared.load(std::memory_order_relaxed);  // Relaxed, and all else, as in announce().
    if (version_of(state) != found->version) continue;
    if (announced_of(state) == world_.ranks) return std::nullopt;
    if ((state & kAnnouncedEarly) != 0) return found->slot;
    world_.announcement(found->slot, world_.ranks) = announcement;
    add(own.announced, 1);
    while (version_of(state) == found->version && announced_of(state) < world_.ranks) {
      if (shared.compare_exchange_weak(state, state | kAnnouncedEarly, std::memory_order_acq_rel)) return found->slot;
    }
    add(own.announced, -1);
  }
}

void TensorTable::complete(std::uint32_t slot) {
  Mark& own = world_.mark(slot, rank_);
  // Release: what this rank read of the slot is read before a new name takes it; see take_slot().
  own.completed.store(own.completed.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

bool TensorTable::announced_by(std::uint32_t slot, int other) {
  // Relaxed: for error messages, for ranks that left, where `presence` orders it, and for Pending::is_met().
  const auto announced = [&](int r) {
    const Mark& mark = world_.mark(slot, r);
    // The link's `announced` counts early ones, which not all ranks elsewhere have announced.
    return (r == world_.ranks ? mark.completed : mark.announced).load(std::memory_order_relaxed);
  };
  return static_cast<std::int32_t>(announced(other) - announced(rank_)) >= 0;
}

int TensorTable::rank_ahead(std::uint32_t slot) const {
  // Acquire: missed() describes what that rank has announced.
  const auto announced = [&](int r) { return world_.mark(slot, r).announced.load(std::memory_order_acquire); };
  // The link's `announced` counts early ones.
  const Mark& mark = world_.mark(slot, rank_);
  const std::uint32_t own = (rank_ == world_.ranks ? mark.completed : mark.announced).load(std::memory_order_relaxed);
  for (int r = 0; r < world_.parties; ++r) {
    if (static_cast<std::int32_t>(announced(r) - own) > 0) return r;
  }
  return -1;
}

std::vector<int> TensorTable::late(std::uint32_t slot) const {
  const std::uint32_t own = world_.mark(slot, world_.ranks).completed.load(std::memory_order_relaxed);
  std::vector<int> ranks;
  for (int r = 0; r < world_.ranks; ++r) {
    const std::uint32_t announced = world_.mark(slot, r).announced.load(std::memory_order_relaxed);
    if (static_cast<std::int32_t>(announced - own) <= 0) ranks.push_back(r);
  }
  return ranks;
}

std::optional<Announced> TensorTable::announced(std::uint32_t slot, int rank) const {
  const Signature& signature = world_.announcement(slot, rank).signature;
  if (signature.failed || signature.dims > kMaxDims) return std::nullopt;
  return Announced{signature.collective, signature.dtype,     signature.op,
                   signature.prescale,   signature.postscale, signature.as_half != 0,
                   signature.group,      signature.count,     {signature.shape, signature.shape + signature.dims}};
}

std::optional<std::vector<Missed>> TensorTable::missed(std::size_t most, bool described) const {
  // Version and operations.
  const auto operation_of = [](std::uint64_t state) { return state >> 16; };
  std::vector<Missed> found;
  std::vector<std::uint32_t> places;
  const std::uint32_t used = world_.slots_used.load(std::memory_order_relaxed);  // Relaxed: see take_slot().
  for (std::uint32_t slot = 0; slot < used && found.size() < most; ++slot) {
    // Acquire: the announcements that it counts are counted in the marks too.
    const std::uint64_t state = world_.slots[slot].state.load(std::memory_order_acquire);
    if (!is_under_way(state) || rank_ahead(slot) < 0) continue;
    found.push_back(Missed{"", operation_of(state), slot});
    places.push_back(slot);
  }
  if (found.empty()) return found;
  // Names are read under the lock, which is held for a short copy only.
  const SharedLockGuard guard(world_.table_lock, rank_, std::try_to_lock);
  if (!guard.owns_lock()) return std::nullopt;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const Slot& slot = world_.slots[places[i]];
    // Relaxed: the version, which says whose the slot is, changes only under the lock.
    const std::uint64_t state = slot.state.load(std::memory_order_relaxed);
    if (operation_of(state) != found[i].operation || !is_under_way(state)) continue;  // it is over
    if (is_patient(name_in(slot))) continue;
    Missed one{std::string(name_in(slot)), found[i].operation, places[i]};
    if (described) {
      // The announcement stays until this rank announces, too.
      const int rank = rank_ahead(places[i]);
      if (rank < 0) continue;
      one.announced = announced(places[i], rank);
    }
    found[kept++] = std::move(one);
  }
  found.resize(kept);
  return found;
}

void TensorTable::stage_inline(std::uint32_t slot, const Request& request, bool watched) {
  // Relaxed: published with the announcement.
  world_.mark(slot, rank_).watch.store(watched ? Mark::kWatched : Mark::kInbox, std::memory_order_relaxed);
  const std::size_t bytes = bytes_of(request);
  const bool carried = request.collective == Collective::kAllreduce && request.input_failure.empty() &&
                       !request.on_device && bytes <= world_.thresholds.inlined &&
                       world_.mark(slot, rank_).place == kNoPlace;
  if (!carried || bytes == 0) return;  // arrays without elements may be null
  void* payload = world_.payload(slot, rank_, bytes);
  if (request.inputs.size() == 1) {
    std::memcpy(payload, request.inputs[0], bytes);
  } else {
    reduce(reduction_of_devices(request), request.inputs.data(), static_cast<int>(request.inputs.size()), &payload, 1,
           request.count);
  }
}

bool may_reduce_inline(World& world, const Request& request) {
  const std::size_t bytes = bytes_of(request);
  return request.collective == Collective::kAllreduce && request.input_failure.empty() && !request.on_device &&
         (bytes <= world.thresholds.inlined || bytes <= world.thresholds.inlined_direct / world.ranks);
}

bool TensorTable::reduce_inline(std::uint32_t slot, const Request& request) {
  if (!may_reduce_inline(world_, request)) return false;
  const std::size_t bytes = bytes_of(request);
  const bool carried = bytes <= world_.thresholds.inlined;
  const int size = world_.ranks;
  for (int r = 0; r < size; ++r) {
    const std::uint64_t place = world_.mark(slot, r).place;
    if (place == kNoPlace && !carried) return false;
    outputs_[r] = place == kNoPlace ? world_.payload(slot, r, bytes) : world_.arena(r) + place;
    inputs_[r] = outputs_[r];
  }
  reduce(reduction_of(request, world_.weights(slot)), inputs_.data(), size, outputs_.data(), size, request.count);
  tell_inline(world_, slot, rank_);
  return true;
}

void tell_inline(World& world, std::uint32_t slot, int rank) {
  for (int r = 0; r < world.ranks; ++r) {
    if (r == rank) continue;
    // Release: publishes the result. Either this or stop_watching() comes first.
    if (world.mark(slot, r).watch.exchange(Mark::kDone, std::memory_order_release) == Mark::kWatched) continue;
    world.rank(r).inbox.put(slot);
    world.rank(r).bell.ring();
  }
}

bool stop_watching(World& world, int rank, std::uint32_t slot) {
  std::uint32_t watched = Mark::kWatched;
  // Acquire: when it fails the result is there. Otherwise nothing is read.
  return world.mark(slot, rank).watch.compare_exchange_strong(watched, Mark::kInbox, std::memory_order_acquire);
}

bool take_inline(World& world, int rank, std::uint32_t slot, const Request& request) {
  if (world.mark(slot, rank).place != kNoPlace) return true;
  const std::size_t bytes = bytes_of(request);
  if (bytes == 0) return false;
  const void* result = world.payload(slot, rank, bytes);
  for (void* output : request.outputs) std::memcpy(output, result, bytes);
  return false;
}

}  // namespace kvstore_hvd
