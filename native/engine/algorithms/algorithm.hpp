// What every rank does with an entry of the schedule, one file for each algorithm. See Algorithm (shm/world.hpp) for
// what each is, and Pipeline for how the steps of successive entries overlap.
#pragma once

#include "engine/algorithms/chunk.hpp"

namespace kvstore_hvd {

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
