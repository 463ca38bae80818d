// What a rank measures of its own operations, by name.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "request/work.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

// How long operations took on this rank.
struct Times {
  // Submitted, until all ranks have submitted it and its first chunk is scheduled (or another rank has reduced it).
  std::chrono::nanoseconds queued{0};
  std::chrono::nanoseconds reducing{0};  // from then on until it is complete
  std::chrono::nanoseconds exposed{0};   // see Rounds
};

// Of the operations under one name.
struct Statistics {
  std::uint64_t operations = 0;            // completed, failed ones included
  std::uint64_t bytes = 0;                 // of one rank's array, over all operations
  Algorithm algorithm = Algorithm::kFail;  // of the last one
  Times total, last;
  std::chrono::steady_clock::time_point submitted;  // the last one
  std::uint32_t round = 0;                          // of the last submission; see Rounds

  void add(const Work& work, std::chrono::steady_clock::time_point completed);
  // What `other` counted and measured, too.
  void add(const Statistics& other);
};

struct NamedStatistics {
  std::string name;
  Statistics statistics;
};

// The rounds that are over, see Rounds.
struct RoundStatistics {
  std::uint64_t count = 0;
  // From the last submission of a round until none of its operations is in flight, or the next round begins; of all.
  std::chrono::nanoseconds exposed{0};
  // The part of it in which something was being reduced; the rest was spent waiting for other ranks.
  std::chrono::nanoseconds reducing{0};
};

struct EngineStatistics {
  std::vector<NamedStatistics> names;
  RoundStatistics rounds;
};

// Finds the time of an operation that nothing else of this rank was hidden behind.
//
// A round is a row of submissions in which no name comes twice: in training, a step. An operation is exposed from the
// last submission of its round (or its own, which may be that) until it is complete, or until the next round begins,
// whichever comes first. What completes before the last submission of its round is not exposed at all: the rank was
// still computing.
//
// One thread at a time. The statistics live until the round of their last submission is over.
class Rounds {
 public:
  void submitted(Statistics& statistics, Work& work);
  void completed(Statistics& statistics, const Work& work, std::chrono::steady_clock::time_point when);
  // The next submission begins another round.
  void end(std::chrono::steady_clock::time_point when);
  // The world is lost: what is under way or completed in this round is not exposed, and the round does not count.
  void forget();
  const RoundStatistics& statistics() const { return statistics_; }

 private:
  struct Completed {
    Statistics* statistics;
    std::chrono::steady_clock::time_point submitted, scheduled, completed;
  };

  std::uint32_t round_ = 1;
  bool begun_ = false;         // something was submitted in this round
  std::size_t under_way_ = 0;  // of this round's operations
  RoundStatistics statistics_;
  std::chrono::steady_clock::time_point last_submission_;
  std::chrono::steady_clock::time_point before_, ended_;  // of the round before: its last submission, its end
  std::vector<Completed> completed_;                      // in this round, since its last submission; in order
};

}  // namespace kvstore_hvd
