// The algorithms: one entry of the schedule on one rank as they see it, and the steps that each consists of.
#pragma once

#include <algorithm>

#include "engine/pending.hpp"

namespace kvstore_hvd {

// Bytes from `begin` to before `end`.
struct Range {
  std::uint64_t begin, end;
};

// An entry: the pieces of tensors that it consists of, where they lie, and waiting for the other ranks.
class Chunk {
 public:
  // `pending`: this rank's requests.
  Chunk(World& world, int rank, const Pending& pending);

  // Turns to an entry. `policy`: how its waits wait.
  void begin(const Entry& entry, std::uint64_t index, const WaitPolicy& policy) {
    entry_ = &entry;
    index_ = index;
    policy_ = &policy;
  }

  World& world() const { return world_; }
  int rank() const { return rank_; }
  const Entry& entry() const { return *entry_; }
  std::uint64_t index() const { return index_; }
  const Request& request(const Piece& piece) const { return pending_.request_on(piece.slot); }

  // Once the world is lost: the other ranks' arrays may be in use again.
  bool is_lost = false;

  // This rank's contribution to a piece, and where its result goes.
  const char* source(const Piece& piece) const {
    const Request& request = this->request(piece);
    // Contributions of several devices are summed into the first output before anything else is done.
    return static_cast<const char*>(request.inputs.size() == 1 ? request.inputs[0] : request.outputs[0]) + piece.offset;
  }
  char* result(const Piece& piece) const { return static_cast<char*>(request(piece).outputs[0]) + piece.offset; }
  // The rank's staging memory for this entry.
  char* staging(int rank) const { return world_.staging(rank, index_); }

  // All of the entry's bytes in staging memory.
  Range all() const { return {0, entry_->staged_bytes}; }
  // Calls `visit(piece, offset in the piece, bytes)` for what lies in the range of staging offsets.
  template <class Visit>
  void for_each_in(Range range, const Visit& visit) const {
    for (std::uint32_t i = 0; i < entry_->n_pieces; ++i) {
      const Piece& piece = entry_->pieces[i];
      const std::uint64_t begin = std::max<std::uint64_t>(piece.staged, range.begin);
      const std::uint64_t end = std::min<std::uint64_t>(piece.staged + piece.bytes, range.end);
      if (begin < end) visit(piece, begin - piece.staged, end - begin);
    }
  }

  // What this rank takes of a piece as a part of a rank's array: where it begins in the piece, and its destination.
  struct Overlap {
    std::uint64_t offset, bytes;
    char* output;
  };
  Overlap overlap(const Piece& piece, const Part& part) const;

  // Copies this rank's contribution to a range into its staging memory, or into other memory of the entry.
  void stage(Range range) const { stage_to(staging(rank_), range); }
  void stage_to(char* memory, Range range) const;

  // This rank's slice of the entry, of one for each rank of this host: whole cache lines, so that no element is cut.
  Range own_slice() const;

  // How all contributions to a piece are reduced.
  Reduction reduction(const Piece& piece) const {
    return reduction_of(request(piece), world_.slots[piece.slot].weights);
  }
  // Reduces `bytes` of the ranks of this host: `input(rank)` is where a rank's lie, `output(i)` where the result goes.
  template <class Input, class Output>
  void reduce(const Reduction& how, const Input& input, const Output& output, int n_outputs, std::uint64_t bytes) {
    for (int r = 0; r < world_.ranks; ++r) inputs_[r] = input(r);
    for (int i = 0; i < n_outputs; ++i) outputs_[i] = output(i);
    kvstore_hvd::reduce(how, inputs_.data(), world_.ranks, outputs_.data(), n_outputs, bytes / size_of(how.dtype));
  }

  // Whether the other hosts' part has arrived. Does not wait: the link rings the bell.
  bool has_arrived() const { return world_.link().filled.reached(static_cast<std::uint32_t>(index_ + 1)); }

  // Until all ranks have filled, or reduced, this entry; false: not yet, ask again. They throw WorldLost.
  bool all_filled() const { return all_at(&RankState::filled, index_ + 1); }
  bool all_reduced() const { return all_at(&RankState::reduced, index_ + 1); }
  bool has_filled(int rank) const { return wait(world_.rank(rank).filled, index_ + 1); }
  bool all_at(Flag RankState::* flag, std::uint64_t target) const;
  bool wait(Flag& flag, std::uint64_t target) const;

 private:
  World& world_;
  const int rank_;
  const Pending& pending_;
  const Entry* entry_ = nullptr;
  std::uint64_t index_ = 0;
  const WaitPolicy* policy_ = nullptr;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

// What every rank does with an entry of the schedule. See Algorithm (shm/world.hpp) for
// what each is, and Pipeline for how the steps of successive entries overlap.
struct Steps {
  // What the entry's bytes go through.
  enum class Memory {
    kNone,     // they do not move
    kStaging,  // the ranks' staging memory
    kArrays,   // the arrays of all ranks, where they lie
    kLink,     // memory that ranks share with the link
    kDevice,   // the devices' own; they say when it is done
  };
  Memory memory;
  // Each waits before it touches anything; false: the other ranks are not there yet, ask again. Null: nothing to do.
  void (*fill)(Chunk& chunk);     // the other ranks no longer read this staging memory for an earlier entry
  bool (*reduce)(Chunk& chunk);   // after that, this rank reads nothing of the others' staging memory
  bool (*collect)(Chunk& chunk);  // after that, this rank's results are complete
};

extern const Steps kOneShot, kTwoShot, kBroadcast, kDirect, kExchange, kReduceScatter;
extern const Steps kLinkSum, kLinkBroadcast, kLinkExchange;

// Those of an algorithm that can be scheduled.
const Steps& steps_of(Algorithm algorithm);

}  // namespace kvstore_hvd
