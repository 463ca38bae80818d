// What a rank measures of its own operations: statistics by name, events of the timeline, facts of a stall report.
#pragma once

#include "request/request.hpp"

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
  Clock::time_point submitted;  // the last one
  std::uint32_t round = 0;      // of the last submission; see Rounds

  void add(const Work& work, Clock::time_point completed);
  // What `other` counted and measured, too.
  void add(const Statistics& other);
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
  std::vector<std::pair<std::string, Statistics>> names;
  RoundStatistics rounds;
};

// Finds how long an operation was exposed: not hidden behind computation. A round is a row of submissions in which no
// name comes twice: in training, a step.
//
//   submissions   a    b    c                     | a (the next round)
//   exposed                 |----- a, b, c -------|
//
// An operation is exposed from the last submission of its round (or its own, which may be that) until it is complete,
// or until the next round begins, whichever comes first; not at all if it completes before that submission.
//
// A rank has also waited in the middle of a round if nothing was in flight at a submission that came at once: later
// than the last completion by less than a quarter of the wait. Waits count by the part of the looks that found the
// program blocked, as it may compute meanwhile, such as load the next batch.
//
// One thread at a time. The statistics live until the round of their last submission is over.
class Rounds {
 public:
  // `waited`: where it adds the nanoseconds in which the program, too, only waited for other ranks, see Counts.
  explicit Rounds(std::atomic<std::int64_t>& waited) : waited_(waited) {}
  void submitted(Statistics& statistics, Work& work);
  void completed(Statistics& statistics, const Work& work, Clock::time_point when);
  // The next submission begins another round.
  void end(Clock::time_point when);
  // From time to time: whether the program is blocked, until results are there.
  void look(bool is_blocked);
  // The world is lost: what is under way or completed in this round is not exposed, and the round does not count.
  void forget();
  const RoundStatistics& statistics() const { return statistics_; }

 private:
  struct Completed {
    Statistics* statistics;
    Clock::time_point submitted, scheduled, completed;
  };

  // Since the last submission of this round: the union of the times from the first chunk to the last of each.
  Clock::duration reducing() const;
  // Before the next submission of this round.
  void look_for_wait(Clock::time_point next);
  void add_wait(std::chrono::nanoseconds time);

  std::atomic<std::int64_t>& waited_;
  std::uint32_t round_ = 1;
  bool begun_ = false;         // something was submitted in this round
  std::size_t under_way_ = 0;  // of this round's operations
  // Looks since the last submission while operations were under way, and those that found the program blocked.
  std::size_t looks_ = 0, blocked_ = 0;
  // The part of blocked ones among the last kMostLooks looks that counted, and how many of those there have been.
  double blocked_part_ = 0;
  std::size_t counted_ = 0;
  std::chrono::nanoseconds unjudged_{0};  // waits before the first look that counts, which judges them
  RoundStatistics statistics_;
  Clock::time_point last_submission_;
  Clock::time_point before_, ended_;  // of the round before: its last submission, its end
  std::vector<Completed> completed_;  // in this round, since its last submission; in order
};

// One operation. Its times never decrease from member to member.
struct TimelineEvent {
  std::string name, label;  // of the request
  Collective collective;
  Algorithm algorithm;
  DType dtype;
  ReduceOp op;
  bool failed;
  bool begins_round;    // see Rounds
  std::uint64_t bytes;  // of this rank's array; kExchange: of the largest of all ranks
  Clock::time_point submitted;
  Clock::time_point since;      // and those before it under its name are over on this rank
  Clock::time_point scheduled;  // as Times::queued ends; `completed` if it never was
  Clock::time_point completed;
  World::OnLink on_link;  // 0: it never was
};

struct TimelineEvents {
  std::vector<TimelineEvent> events;  // in the order of completion
  std::uint64_t lost = 0;             // found no room
};

// The operations that one rank completes, kept in bounded memory until they are taken. One thread at a time.
class Timeline {
 public:
  // Keeps up to `capacity` operations that complete from now on; those kept before are dropped.
  void start(std::size_t capacity);
  // Keeps nothing more. What was kept can still be taken.
  void stop() { capacity_ = 0; }

  void record(const Work& work, Clock::time_point completed, bool failed) {
    if (capacity_ != 0) add(work, completed, failed);
  }

  // What was kept since the last call.
  TimelineEvents take();

 private:
  void add(const Work& work, Clock::time_point completed, bool failed);

  std::size_t capacity_ = 0;  // 0: off
  TimelineEvents kept_;
};

// The ranks that an announced operation waits for, by their numbers in the world.
struct Blamed {
  // Those that have not announced it. When all have: those that are behind inside the collective, if any.
  std::vector<int> ranks;
  bool announced_by_all = false;
};

// A request of this rank that is announced and not over.
struct Waiting {
  std::string name;
  std::string operation;  // as errors name it: "allreduce 'dense0_weight' (key 3)"
  // When it was submitted, or became the first of its name. With the name it tells requests apart.
  Clock::time_point since;
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
  std::optional<Announced> announced = {};  // by one of them, if `described`
};

}  // namespace kvstore_hvd
