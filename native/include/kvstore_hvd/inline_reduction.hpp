// The shortest way for small allreduces: every announcement carries its rank's contribution, so the last rank to
// announce has all of them. It reduces them at once, leaves the result where each contribution was, and puts the slot
// into the inboxes of the others: no schedule, and nobody waits for anybody twice.
//
// Arrays in arenas are reduced where they lie and need not be carried; so larger ones can go this way.
#pragma once

#include <cstdint>
#include <vector>

#include "kvstore_hvd/request.hpp"
#include "kvstore_hvd/world.hpp"

namespace kvstore_hvd {

// One thread at a time. Between a rank's announcement of an operation and its take() the slot's payloads do not change,
// except that the last rank writes the result: a rank announces the next operation only after take(), and that is
// complete only when all have.
class InlineReduction {
 public:
  InlineReduction(World& world, int rank) : world_(world), rank_(rank), inputs_(world.size), outputs_(world.size) {}

  // Before this rank announces: its mark says where its array lies.
  void stage(std::uint32_t slot, const Request& request);

  // As the last rank, when all have announced the same. Returns false, and does nothing, when it must be scheduled.
  bool carry_out(std::uint32_t slot, const Request& request);

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
