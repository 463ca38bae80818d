#include "engine/inline_reduction.hpp"

#include <cstring>

#include "reduce/reduce.hpp"

namespace kvstore_hvd {

void InlineReduction::stage(std::uint32_t slot, const Request& request, bool watched) {
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

bool InlineReduction::may_carry_out(World& world, const Request& request) {
  const std::size_t bytes = bytes_of(request);
  return request.collective == Collective::kAllreduce && request.input_failure.empty() && !request.on_device &&
         (bytes <= world.thresholds.inlined || bytes <= world.thresholds.inlined_direct / world.ranks);
}

bool InlineReduction::carry_out(std::uint32_t slot, const Request& request) {
  if (!may_carry_out(world_, request)) return false;
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
  tell(world_, slot, rank_);
  return true;
}

void InlineReduction::tell(World& world, std::uint32_t slot, int rank) {
  for (int r = 0; r < world.ranks; ++r) {
    if (r == rank) continue;
    // Release and acquire: publishes the result, and comes before or after give_up().
    if (world.mark(slot, r).watch.exchange(Mark::kDone, std::memory_order_acq_rel) == Mark::kWatched) continue;
    world.rank(r).inbox.put(slot);
    world.rank(r).bell.ring();
  }
}

bool InlineReduction::give_up(World& world, int rank, std::uint32_t slot) {
  std::uint32_t watched = Mark::kWatched;
  // Acquire: when it fails the result is there. Release: as the rank's announcement.
  return world.mark(slot, rank).watch.compare_exchange_strong(watched, Mark::kInbox, std::memory_order_acq_rel);
}

bool InlineReduction::take(World& world, int rank, std::uint32_t slot, const Request& request) {
  if (world.mark(slot, rank).place != kNoPlace) return true;
  const std::size_t bytes = bytes_of(request);
  if (bytes == 0) return false;
  const void* result = world.payload(slot, rank, bytes);
  for (void* output : request.outputs) std::memcpy(output, result, bytes);
  return false;
}

}  // namespace kvstore_hvd
