// What a rank waits for, and what the others wait for because of it: the facts of a stall report.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/types.hpp"

namespace kvstore_hvd {

// Whom an announced operation waits for; ranks by their numbers in the world.
struct Blamed {
  // Those that have not announced it. When all have: those that are behind inside the collective; none when nobody is.
  std::vector<int> ranks;
  bool announced_by_all = false;
};

// A request of this rank that is announced and not over.
struct Waiting {
  std::string name;
  std::string operation;  // as errors name it: "allreduce 'dense0_weight' (key 3)"
  // When it was submitted, or became the first of its name. With the name it tells requests apart.
  std::chrono::steady_clock::time_point since;
  std::chrono::nanoseconds waited;  // since then, while this process ran
  Blamed blamed;
};

// What a rank wants to do under a name; without what a broadcast or an exchange needs besides.
struct Announced {
  Collective collective;
  DType dtype;
  ReduceOp op;
  double prescale, postscale;
  bool as_half;
  std::uint64_t group;
  std::uint64_t count;
  std::vector<std::int64_t> shape;
};

// An operation that other ranks have announced and this rank has not.
struct Missed {
  std::string name;
  std::uint64_t operation;  // with the name it tells operations apart
  std::uint32_t slot;
  std::optional<Announced> announced = {};  // by one of them, if that was asked for and can be told
};

}  // namespace kvstore_hvd
