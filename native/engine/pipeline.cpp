#include "engine/pipeline.hpp"

#include <cstring>

namespace kvstore_hvd {

Pipeline::Pipeline(World& world, Alarm& alarm, const Pending& pending, DeviceQueue& devices,
                   std::function<void(std::uint32_t)> finished)
    : alarm_(alarm), world_(world), pending_(pending), devices_(devices), finished_(std::move(finished)) {}

bool Pipeline::advance(const WaitPolicy& policy) {
  policy_ = policy;
  if (const auto slot = world_.rank(rank_).inbox.get(taken_)) {
    ++taken_;
    take_inline_result(*slot);
    finished_(*slot);
    return true;
  }
  if (const auto slot = devices_.take_finished()) {
    finished_(*slot);
    return true;
  }
  const auto next = static_cast<std::uint32_t>(fetched_);
  if (fetched_ == filled_ && filled_ - collected_ < depth_ && (!chunk_.is_lost || schedule_.is_published(next)) &&
      schedule_.fetch(next, entry(fetched_))) {
    pending_.scheduled(entry(fetched_));
    ++fetched_;
  }
  if (fetched_ == collected_) return false;

  const bool started = fetched_ != filled_ && fill(filled_);
  if (started) ++filled_;
  // With nothing new to fill, whatever is under way goes one stage further at once.
  if (reduced_ != filled_ && (!started || filled_ - reduced_ > 1)) {
    if (!reduce_entry(reduced_)) return true;
    ++reduced_;
  }
  // Over hosts as soon as it has come: the link has begun with the next entries meanwhile.
  if (collected_ != reduced_ && (!started || filled_ - collected_ > 2 || world_.has_link())) {
    if (collect(collected_)) {
      ++collected_;
    } else if (!started && waits_for_link()) {
      return false;
    }
  }
  return true;
}

// What the link has sent was right when it was sent; nothing is sent any more.
bool Pipeline::drain_arrived(const WaitPolicy& policy) {
  policy_ = policy;
  const auto next = static_cast<std::uint32_t>(fetched_);
  if (fetched_ == collected_ && schedule_.is_published(next) && schedule_.fetch(next, entry(fetched_))) {
    pending_.scheduled(entry(fetched_));
    ++fetched_;
  }
  // Nothing moves of what has failed by itself.
  if (fetched_ != collected_ && reduced_ == collected_ && entry(collected_).algorithm == Algorithm::kFail) {
    if (filled_ == collected_) {
      if (!fill(filled_)) return true;
      ++filled_;
    }
    reduce_entry(reduced_++);
  }
  if (collected_ == reduced_ || !collect(collected_)) return false;
  ++collected_;
  return true;
}

void Pipeline::take_inline_result(std::uint32_t slot) {
  const Request& request = pending_.request_on(slot);
  // Before the caller learns that its operation is done, and may look.
  if (take_inline(world_, rank_, slot, request)) {
    bytes_in_place_.fetch_add(bytes_of(request), std::memory_order_relaxed);
  }
}

const Steps& Pipeline::turn_to(std::uint64_t index) {
  const Entry& entry = this->entry(index);
  chunk_.begin(entry, index, policy_);
  return steps_of(entry.algorithm);
}

void Pipeline::sum_devices(const Entry& entry) {
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const Piece& piece = entry.pieces[i];
    const Request& request = pending_.request_on(piece.slot);
    if (request.inputs.size() < 2 || piece.bytes == 0) continue;
    std::vector<const void*> local;
    for (const void* input : request.inputs) local.push_back(static_cast<const char*>(input) + piece.offset);
    void* sum = chunk_.result(piece);
    reduce(reduction_of_devices(request), local.data(), static_cast<int>(local.size()), &sum, 1,
           piece.bytes / size_of(request.dtype));
  }
}

void Pipeline::hand_over(const Entry& entry) {
  const std::uint32_t first = entry.pieces[0].slot;
  DeviceBatch batch;
  batch.collective = pending_.request_on(first).collective;
  batch.reduction = reduction_of(pending_.request_on(first), world_.slots[first].weights);
  batch.root = entry.root;
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const std::uint32_t slot = entry.pieces[i].slot;
    const Request& request = pending_.request_on(slot);
    batch.operations.push_back({slot, request.name, request.label, request.inputs, request.outputs, request.count,
                                request.contributed, request.parts});
  }
  devices_.put(std::move(batch));
}

bool Pipeline::fill(std::uint64_t index) {
  const Steps& steps = turn_to(index);
  // The others read this staging memory last while they reduced the entry that used it before. Without staging memory,
  // only the next entry's place in the schedule must be free.
  const bool staged = steps.memory == Steps::Memory::kStaging || steps.memory == Steps::Memory::kLink;
  if (!chunk_.all_at(&RankState::reduced, index + 1 - (staged ? kStages : kEntries - 1))) return false;
  if (staged) sum_devices(chunk_.entry());
  if (steps.fill != nullptr) steps.fill(chunk_);
  // A device needs the other ranks'.
  if (steps.memory == Steps::Memory::kDevice && !chunk_.is_lost) hand_over(chunk_.entry());
  world_.rank(rank_).filled.post(static_cast<std::uint32_t>(index + 1));
  return true;
}

bool Pipeline::reduce_entry(std::uint64_t index) {
  const Steps& steps = turn_to(index);
  if (steps.reduce != nullptr && !steps.reduce(chunk_)) return false;
  world_.rank(rank_).reduced.post(static_cast<std::uint32_t>(index + 1));
  if (world_.has_link() && are_all_at(&RankState::reduced, index + 1)) ring_link(world_);
  return true;
}

bool Pipeline::collect(std::uint64_t index) {
  const Steps& steps = turn_to(index);
  if (steps.collect != nullptr && !steps.collect(chunk_)) return false;
  if (steps.memory == Steps::Memory::kLink) pending_.arrived(chunk_.entry(), world_.on_link[index % kLinkSlots]);
  if (steps.memory != Steps::Memory::kDevice) deliver(chunk_.entry());  // a device says itself when it is done
  if (world_.has_link()) {
    world_.rank(rank_).collected.post(static_cast<std::uint32_t>(index + 1));
    // Relaxed: if the link has published more meanwhile it has looked.
    const std::uint32_t more = world_.head.load(std::memory_order_relaxed) - static_cast<std::uint32_t>(index + 1);
    if (more + 1 >= kLinkSlots && are_all_at(&RankState::collected, index + 1)) ring_link(world_);
  }
  return true;
}

void Pipeline::deliver(const Entry& entry) {
  const bool failed = entry.algorithm == Algorithm::kFail;
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const Piece& piece = entry.pieces[i];
    const bool is_in_place = entry.algorithm == Algorithm::kDirect ||
                             (entry.algorithm == Algorithm::kLinkSum && world_.slots[piece.slot].direct != 0);
    // Before the caller learns that its operation is done, and may look.
    if (is_in_place) bytes_in_place_.fetch_add(piece.bytes, std::memory_order_relaxed);
  }
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const Piece& piece = entry.pieces[i];
    if (!failed) copy_to_other_outputs(piece);
    // The slot is stable until this rank says that it has completed it.
    if (failed || piece.offset + piece.bytes == world_.slots[piece.slot].bytes) finished_(piece.slot);
  }
}

// Of this host. The one that is last sees it, and so do others that come at the same time.
bool Pipeline::are_all_at(Flag RankState::* flag, std::uint64_t target) {
  for (int r = 0; r < world_.ranks; ++r) {
    if (!(world_.rank(r).*flag).reached_after_post(static_cast<std::uint32_t>(target))) return false;
  }
  return true;
}

void Pipeline::copy_to_other_outputs(const Piece& piece) {
  const Request& request = pending_.request_on(piece.slot);
  for (std::size_t o = 1; o < request.outputs.size(); ++o) {
    std::memcpy(static_cast<char*>(request.outputs[o]) + piece.offset, chunk_.result(piece), piece.bytes);
  }
}

}  // namespace kvstore_hvd
