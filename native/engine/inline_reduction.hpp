// The shortest way for small allreduces: every announcement carries its rank's contribution, so the last rank to
// announce has all of them. It reduces them at once, leaves the result where each contribution was, and tells the
// others: no schedule, and nobody waits for anybody twice.
//
// A rank whose caller waits watches its own mark, where flag and result come in one cache line. Everybody else, and a
// rank that gives up watching, finds the slot in its inbox, and its bell is rung.
//
// Arrays in arenas are reduced where they lie and need not be carried; so larger ones can go this way.
#pragma once

#include <cstdint>
#include <vector>

#include "request/request.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

// One thread at a time. Between a rank's announcement of an operation and its take() the slot's payloads do not change,
// except that the last rank writes the result: a rank announces the next operation only after take(), and that is
// complete only when all have.
class InlineReduction {
 public:
  InlineReduction(World& world, int rank) : world_(world), rank_(rank), inputs_(world.ranks), outputs_(world.ranks) {}

  // Before this rank announces; its mark says where its array lies. `watched`: a thread will watch the mark.
  void stage(std::uint32_t slot, const Request& request, bool watched);

  // Whether the operation may be carried out here, as far as this rank's own request tells.
  static bool may_carry_out(World& world, const Request& request);

  // As the last rank, when all have announced the same: carries it out and tells the others. Returns false, and does
  // nothing, when it must be scheduled.
  bool carry_out(std::uint32_t slot, const Request& request);

  // Tells the ranks of this host, but for `rank`, that it was carried out.
  static void tell(World& world, std::uint32_t slot, int rank);

  // Whether it was carried out, for a rank that watches. Acquire: the result is there. Any thread.
  static bool is_done(World& world, int rank, std::uint32_t slot) {
    return world.mark(slot, rank).watch.load(std::memory_order_acquire) == Mark::kDone;
  }
  // Gives up watching; returns false when it has been carried out meanwhile. Any thread.
  static bool give_up(World& world, int rank, std::uint32_t slot);

  // After it was carried out, by whatever rank: the result into this rank's arrays. Returns whether it was there, the
  // array being in an arena. Any thread.
  static bool take(World& world, int rank, std::uint32_t slot, const Request& request);

 private:
  World& world_;
  const int rank_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace kvstore_hvd
