// One entry of the schedule on one rank, as an algorithm sees it: the pieces of tensors that it consists of, where they
// lie, and waiting for the other ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/pending.hpp"
#include "reduce/reduce.hpp"
#include "request/request.hpp"
#include "shm/wait.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

// Bytes from `begin` to before `end`.
struct Range {
  std::uint64_t begin, end;
};

class Chunk {
 public:
  // `pending`: this rank's requests.
  Chunk(World& world, int rank, const Pending& pending);

  // Which entry it is, from now on. `policy`: how its waits wait.
  void is(const Entry& entry, std::uint64_t index, const WaitPolicy& policy) {
    entry_ = &entry;
    index_ = index;
    policy_ = &policy;
  }

  World& world() const { return world_; }
  int rank() const { return rank_; }
  const Entry& entry() const { return *entry_; }
  std::uint64_t index() const { return index_; }
  const Request& request(const Piece& piece) const { return pending_.request_on(piece.slot); }

  // Once the world is lost: the other ranks' arrays may be in use again, and the others take part in nothing new.
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

  // What this rank takes of a piece as a part of some rank's array: where that begins in the piece, and where it goes.
  struct Overlap {
    std::uint64_t offset, bytes;
    char* output;
  };
  Overlap overlap(const Piece& piece, const Part& part) const;

  // Copies what lies in the range from this rank's contribution into its staging memory, or where else the entry's
  // bytes have a place.
  void stage(Range range) const { stage_to(staging(rank_), range); }
  void stage_to(char* memory, Range range) const;

  // This rank's slice of the entry, of one for each rank of this host: whole cache lines, so that no element is cut.
  Range own_slice() const;

  // Reduces a part of a piece: `input(rank)` is where that rank's bytes lie, `output(rank)` where they go. Into all
  // ranks' outputs, or into this rank's only.
  template <class Input>
  void reduce_to_own(const Piece& piece, const Input& input, char* output, std::uint64_t bytes) {
    for (int r = 0; r < world_.ranks; ++r) inputs_[r] = input(r);
    void* own = output;
    reduce(reduction_of(request(piece), weights(piece)), inputs_.data(), world_.ranks, &own, 1, elements(piece, bytes));
  }
  template <class Input, class Output>
  void reduce_to_all(const Piece& piece, const Input& input, const Output& output, std::uint64_t bytes) {
    for (int r = 0; r < world_.ranks; ++r) {
      inputs_[r] = input(r);
      outputs_[r] = output(r);
    }
    reduce(reduction_of(request(piece), weights(piece)), inputs_.data(), world_.ranks, outputs_.data(), world_.ranks,
           elements(piece, bytes));
  }

  // Over hosts: the sum of this host's ranks for a part of a piece, into `output`.
  template <class Input>
  void reduce_within_host(const Piece& piece, const Input& input, char* output, std::uint64_t bytes) {
    for (int r = 0; r < world_.ranks; ++r) inputs_[r] = input(r);
    void* own = output;
    reduce(reduction_within_host(request(piece)), inputs_.data(), world_.ranks, &own, 1, elements(piece, bytes));
  }

  // Whether all has come from the other hosts. Does not wait: the link rings the bell.
  bool has_arrived() const { return world_.link().filled.reached(static_cast<std::uint32_t>(index_ + 1)); }

  // Until all ranks have filled, or reduced, this entry; false: not yet, ask again. They throw WorldLost.
  bool all_filled() const { return all_at(&RankState::filled, index_ + 1); }
  bool all_reduced() const { return all_at(&RankState::reduced, index_ + 1); }
  bool has_filled(int rank) const { return wait(world_.rank(rank).filled, index_ + 1); }
  bool all_at(Flag RankState::* flag, std::uint64_t target) const;
  bool wait(Flag& flag, std::uint64_t target) const;

 private:
  double weights(const Piece& piece) const { return world_.slots[piece.slot].weights; }
  std::size_t elements(const Piece& piece, std::uint64_t bytes) const { return bytes / size_of(request(piece).dtype); }

  World& world_;
  const int rank_;
  const Pending& pending_;
  const Entry* entry_ = nullptr;
  std::uint64_t index_ = 0;
  const WaitPolicy* policy_ = nullptr;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace kvstore_hvd
