#include "engine/pipeline.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/inline_reduction.hpp"
#include "reduce/reduce.hpp"

namespace kvstore_hvd {
namespace {

constexpr std::uint64_t kLine = 64;

struct Range {
  std::uint64_t begin, end;
};

// The slice of an entry that `rank` reduces in the two-shot: whole cache lines, so that no element is cut.
Range slice_of(const Entry& entry, std::uint32_t size, int rank) {
  const std::uint64_t lines = (entry.staged_bytes + kLine - 1) / kLine;
  const std::uint64_t per_rank = (lines + size - 1) / size * kLine;
  const std::uint64_t begin = std::min<std::uint64_t>(per_rank * static_cast<std::uint64_t>(rank), entry.staged_bytes);
  return {begin, std::min<std::uint64_t>(begin + per_rank, entry.staged_bytes)};
}

// Calls `visit(piece, offset in the piece, bytes)` for what lies in the range of staging offsets.
template <class Visit>
void for_each_in(const Entry& entry, Range range, const Visit& visit) {
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const Piece& piece = entry.pieces[i];
    const std::uint64_t begin = std::max<std::uint64_t>(piece.staged, range.begin);
    const std::uint64_t end = std::min<std::uint64_t>(piece.staged + piece.bytes, range.end);
    if (begin < end) visit(piece, begin - piece.staged, end - begin);
  }
}

const char* source_of(const Request& request) {
  // Contributions of several devices are summed into the first output before they are staged.
  return static_cast<const char*>(request.inputs.size() == 1 ? request.inputs[0] : request.outputs[0]);
}
char* result_of(const Request& request) { return static_cast<char*>(request.outputs[0]); }

}  // namespace

Pipeline::Pipeline(World& world, Alarm& alarm, std::function<const Request&(std::uint32_t)> request_of,
                   std::function<void(const Entry&)> scheduled, std::function<void(std::uint32_t)> finished,
                   DeviceQueue& devices)
    : world_(world),
      rank_(alarm.rank()),
      schedule_(world, alarm),
      request_of_(std::move(request_of)),
      scheduled_(std::move(scheduled)),
      finished_(std::move(finished)),
      devices_(devices),
      inputs_(world.size),
      outputs_(world.size) {}

bool Pipeline::advance(const WaitPolicy& policy) {
  policy_ = policy;
  if (const auto slot = world_.rank(rank_).inbox.get(taken_)) {
    ++taken_;
    take(*slot);
    finished_(*slot);
    return true;
  }
  if (const auto slot = devices_.take_finished()) {
    finished_(*slot);
    return true;
  }
  const auto next = static_cast<std::uint32_t>(fetched_);
  if (fetched_ == filled_ && filled_ - collected_ < kStages && (!lost_ || schedule_.is_decided(next)) &&
      schedule_.fetch(next, entry(fetched_))) {
    scheduled_(entry(fetched_));
    ++fetched_;
  }
  if (fetched_ == collected_) return false;

  const bool started = fetched_ != filled_ && fill(entry(filled_), filled_);
  if (started) ++filled_;
  // With nothing new to fill, whatever is under way goes one stage further at once.
  if (reduced_ != filled_ && (!started || filled_ - reduced_ > 1)) {
    if (!reduce_entry(entry(reduced_), reduced_)) return true;
    ++reduced_;
  }
  if (collected_ != reduced_ && (!started || filled_ - collected_ > 2)) {
    if (collect(entry(collected_), collected_)) ++collected_;
  }
  return true;
}

void Pipeline::take(std::uint32_t slot) {
  const Request& request = request_of_(slot);
  // Before the caller learns that its operation is done, and may look.
  if (InlineReduction::take(world_, rank_, slot, request)) {
    bytes_in_place_.fetch_add(bytes_of(request), std::memory_order_relaxed);
  }
}

bool Pipeline::wait_all(Flag RankState::* flag, std::uint64_t target) const {
  for (int r = 0; r < static_cast<int>(world_.size); ++r) {
    if (r == rank_) continue;
    if (!(world_.rank(r).*flag).wait(static_cast<std::uint32_t>(target), policy_, world_.failure)) return false;
  }
  return true;
}

void Pipeline::sum_devices(const Entry& entry) {
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const Piece& piece = entry.pieces[i];
    const Request& request = request_of_(piece.slot);
    if (request.inputs.size() < 2 || piece.bytes == 0) continue;
    std::vector<const void*> local;
    for (const void* input : request.inputs) local.push_back(static_cast<const char*>(input) + piece.offset);
    void* sum = result_of(request) + piece.offset;
    reduce(local_reduction_of(request), local.data(), static_cast<int>(local.size()), &sum, 1,
           piece.bytes / size_of(request.dtype));
  }
}

void Pipeline::hand_over(const Entry& entry) {
  const std::uint32_t first = entry.pieces[0].slot;
  DeviceBatch batch;
  batch.collective = request_of_(first).collective;
  batch.reduction = reduction_of(request_of_(first), world_.slots[first].weights);
  batch.root = entry.root;
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const std::uint32_t slot = entry.pieces[i].slot;
    const Request& request = request_of_(slot);
    batch.operations.push_back({slot, request.name, request.label, request.inputs, request.outputs, request.count,
                                request.contributed, request.parts});
  }
  devices_.put(std::move(batch));
}

bool Pipeline::fill(const Entry& entry, std::uint64_t index) {
  // The others read this staging memory last while they reduced the entry that used it before. Without staging memory,
  // only the next entry's place in the schedule must be free.
  const bool staged = entry.algorithm != Algorithm::kDirect && entry.algorithm != Algorithm::kDevice;
  if (!wait_all(&RankState::reduced, index + 1 - (staged ? kStages : kEntries - 1))) return false;
  if (entry.algorithm != Algorithm::kFail && staged) sum_devices(entry);
  char* staging = world_.staging(rank_, index);
  const auto stage = [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    std::memcpy(staging + piece.staged + offset, source_of(request_of_(piece.slot)) + piece.offset + offset, bytes);
  };
  const Range all{0, entry.staged_bytes};
  switch (entry.algorithm) {
    case Algorithm::kFail:
    case Algorithm::kDirect:
    case Algorithm::kInline:
      break;
    case Algorithm::kDevice:
      if (!lost_) hand_over(entry);  // it needs the others
      break;
    case Algorithm::kOneShot:
      for_each_in(entry, all, stage);
      break;
    case Algorithm::kTwoShot: {
      // This rank's own slice is reduced from where it lies.
      const Range own = slice_of(entry, world_.size, rank_);
      for_each_in(entry, Range{0, own.begin}, stage);
      for_each_in(entry, Range{own.end, entry.staged_bytes}, stage);
      break;
    }
    case Algorithm::kBroadcast:
      if (entry.root == rank_) for_each_in(entry, all, stage);
      break;
    case Algorithm::kExchange:
    case Algorithm::kReduceScatter:
      for_each_in(entry, all, [&](const Piece& piece, std::uint64_t, std::uint64_t bytes) {
        const Request& request = request_of_(piece.slot);
        const std::uint64_t own = request.collective == Collective::kExchange
                                      ? request.contributed * size_of(request.dtype)
                                      : piece.offset + bytes;
        if (own > piece.offset) stage(piece, 0, std::min(bytes, own - piece.offset));
      });
      break;
  }
  world_.rank(rank_).filled.post(static_cast<std::uint32_t>(index + 1));
  return true;
}

void Pipeline::reduce_claimed(const Entry& entry, std::uint64_t index) {
  Claims& claims = world_.claims[index % kEntries];
  const std::uint32_t parts = (entry.staged_bytes + entry.part_bytes - 1) / entry.part_bytes;
  for (;;) {
    // Relaxed: the arrays became visible with the entry.
    const std::uint32_t part = claims.next.fetch_add(1, std::memory_order_relaxed);
    if (part >= parts) return;
    const std::uint64_t begin = std::uint64_t{part} * entry.part_bytes;
    reduce_range(entry, index, begin, std::min<std::uint64_t>(begin + entry.part_bytes, entry.staged_bytes));
    // Release and acquire: whoever does the last part publishes what all have written.
    if (claims.done.fetch_add(1, std::memory_order_acq_rel) + 1 == parts) {
      claims.finished.post(static_cast<std::uint32_t>(index + 1));
    }
  }
}

void Pipeline::reduce_range(const Entry& entry, std::uint64_t index, std::uint64_t begin, std::uint64_t end) {
  const bool direct = entry.algorithm == Algorithm::kDirect;
  const bool to_all = direct || entry.algorithm == Algorithm::kTwoShot;
  for_each_in(entry, Range{begin, end}, [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    const Request& request = request_of_(piece.slot);
    for (int r = 0; r < static_cast<int>(world_.size); ++r) {
      char* staged = direct ? world_.arena(r) + world_.mark(piece.slot, r).place + piece.offset + offset
                            : world_.staging(r, index) + piece.staged + offset;
      inputs_[r] = r == rank_ ? source_of(request) + piece.offset + offset : staged;
      outputs_[r] = r == rank_ ? result_of(request) + piece.offset + offset : staged;
    }
    void* const* outputs = to_all ? outputs_.data() : &outputs_[rank_];
    reduce(reduction_of(request, world_.slots[piece.slot].weights), inputs_.data(), static_cast<int>(world_.size),
           outputs, to_all ? static_cast<int>(world_.size) : 1, bytes / size_of(request.dtype));
  });
}

void Pipeline::take_parts(const Entry& entry, std::uint64_t index) {
  for_each_in(entry, Range{0, entry.staged_bytes}, [&](const Piece& piece, std::uint64_t, std::uint64_t bytes) {
    const Request& request = request_of_(piece.slot);
    for (const Part& part : request.parts) {
      const std::uint64_t begin = std::max<std::uint64_t>(part.from, piece.offset);
      const std::uint64_t end = std::min<std::uint64_t>(part.from + part.bytes, piece.offset + bytes);
      if (begin >= end) continue;
      const auto input_of = [&](int r) {
        return r == rank_ ? source_of(request) + begin
                          : world_.staging(r, index) + piece.staged + (begin - piece.offset);
      };
      void* output = result_of(request) + part.to + (begin - part.from);
      if (entry.algorithm == Algorithm::kExchange) {
        std::memcpy(output, input_of(part.rank), end - begin);
        continue;
      }
      for (int r = 0; r < static_cast<int>(world_.size); ++r) inputs_[r] = input_of(r);
      reduce(reduction_of(request, world_.slots[piece.slot].weights), inputs_.data(), static_cast<int>(world_.size),
             &output, 1, (end - begin) / size_of(request.dtype));
    }
  });
}

bool Pipeline::reduce_entry(const Entry& entry, std::uint64_t index) {
  switch (entry.algorithm) {
    case Algorithm::kFail:
    case Algorithm::kInline:
    case Algorithm::kDevice:
      break;
    case Algorithm::kOneShot:
      if (!wait_all(&RankState::filled, index + 1)) return false;
      reduce_range(entry, index, 0, entry.staged_bytes);
      break;
    case Algorithm::kTwoShot: {
      if (!wait_all(&RankState::filled, index + 1)) return false;
      const Range own = slice_of(entry, world_.size, rank_);
      reduce_range(entry, index, own.begin, own.end);
      break;
    }
    case Algorithm::kDirect:
      // No waiting: that an entry is scheduled says that all arrays are ready. Once the world is lost, the others' may
      // be in use again.
      if (!lost_) reduce_claimed(entry, index);
      break;
    case Algorithm::kExchange:
    case Algorithm::kReduceScatter:
      if (!wait_all(&RankState::filled, index + 1)) return false;
      take_parts(entry, index);
      break;
    case Algorithm::kBroadcast: {
      const auto target = static_cast<std::uint32_t>(index + 1);
      if (entry.root != rank_ && !world_.rank(entry.root).filled.wait(target, policy_, world_.failure)) return false;
      const char* staged = world_.staging(entry.root, index);
      for_each_in(entry, Range{0, entry.staged_bytes},
                  [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
                    const Request& request = request_of_(piece.slot);
                    char* result = result_of(request) + piece.offset + offset;
                    if (entry.root == rank_ && request.inputs[0] == request.outputs[0]) return;
                    std::memcpy(result, staged + piece.staged + offset, bytes);
                  });
      break;
    }
  }
  world_.rank(rank_).reduced.post(static_cast<std::uint32_t>(index + 1));
  return true;
}

bool Pipeline::collect(const Entry& entry, std::uint64_t index) {
  if (entry.algorithm == Algorithm::kDevice) return true;  // the devices say when
  if (entry.algorithm == Algorithm::kDirect) {
    Flag& finished = world_.claims[index % kEntries].finished;
    if (!finished.wait(static_cast<std::uint32_t>(index + 1), policy_, world_.failure)) return false;
  }
  if (entry.algorithm == Algorithm::kTwoShot) {
    if (!wait_all(&RankState::reduced, index + 1)) return false;
    const char* staging = world_.staging(rank_, index);
    const auto take = [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
      std::memcpy(result_of(request_of_(piece.slot)) + piece.offset + offset, staging + piece.staged + offset, bytes);
    };
    const Range own = slice_of(entry, world_.size, rank_);
    for_each_in(entry, Range{0, own.begin}, take);
    for_each_in(entry, Range{own.end, entry.staged_bytes}, take);
  }
  if (entry.algorithm == Algorithm::kDirect) {
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < entry.n_pieces; ++i) bytes += entry.pieces[i].bytes;
    // Before the caller learns that its operation is done, and may look.
    bytes_in_place_.fetch_add(bytes, std::memory_order_relaxed);
  }
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const Piece& piece = entry.pieces[i];
    if (entry.algorithm != Algorithm::kFail) {
      const Request& request = request_of_(piece.slot);
      for (std::size_t o = 1; o < request.outputs.size(); ++o) {
        std::memcpy(static_cast<char*>(request.outputs[o]) + piece.offset, result_of(request) + piece.offset,
                    piece.bytes);
      }
    }
    // The slot is stable until this rank says that it has completed it.
    if (piece.offset + piece.bytes == world_.slots[piece.slot].bytes || entry.algorithm == Algorithm::kFail) {
      finished_(piece.slot);
    }
  }
  return true;
}

}  // namespace kvstore_hvd
