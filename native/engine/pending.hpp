// The requests of one rank that are not over: queued under their names, the first of each name announced to the other
// ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/running_time.hpp"
#include "engine/engine_options.hpp"
#include "engine/tensor_table.hpp"
#include "report/stall.hpp"
#include "report/statistics.hpp"
#include "report/timeline.hpp"
#include "request/messages.hpp"
#include "request/work.hpp"
#include "shm/alarm.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

// One thread at a time, unless a member says otherwise. A lost world ends what is under way here silently: whoever
// makes progress finds the failure and takes everything away.
class Pending {
 public:
  Pending(World& world, Alarm& alarm, const Messages& messages, const Standstills& standstills);

  // Queues the request; it is announced once those under its name that came before are over. Says whether that made it
  // ready, this rank being the last: kAlone when this rank can carry it out by itself, kDone when it has (its result
  // can be taken). Every bell but this rank's own has been rung then.
  enum class Ready { kNot, kTogether, kAlone, kDone };
  struct Added {
    Ready ready = Ready::kNot;
    std::uint32_t slot = kNoSlot;  // unless it is not announced
  };
  // `watched`: if it is announced now, a thread will watch its mark, see InlineReduction.
  Added add(std::shared_ptr<Work> work, bool watched);

  // The request that this rank has in flight on a slot. For the thread that carries out the schedule, without a lock:
  // it learns of the slot from the announcement.
  const Request& request_on(std::uint32_t slot) const { return in_flight_[slot].work->request(); }

  // Whether the operation on `slot` is that of `work`, and not completed. Not once the world is lost.
  bool is_in_flight(std::uint32_t slot, const Work& work) const { return in_flight_[slot].work == &work; }

  // Whether every rank has announced it. What TensorTable::missed() shows of a rank orders all that the rank announced
  // before, or saw to be announced.
  bool is_met(const Work& work);

  // The entry is part of the schedule, and nothing of it is done yet. As request_on().
  void scheduled(const Entry& entry) const;
  // Other hosts' part in it is done.
  void arrived(const Entry& entry, const World::OnLink& times) const;

  // The operation on `slot` is over on this rank: hands out its work and how it ended, and goes on with the next of its
  // name.
  struct Completed {
    std::shared_ptr<Work> work;
    Status status;
  };
  Completed complete(std::uint32_t slot, std::chrono::steady_clock::time_point now);

  // Once the world is lost: the slots of this rank's operations that other ranks have carried out, and whether there
  // are others that one may be carrying out at this moment.
  struct CarriedOut {
    std::vector<std::uint32_t> slots;
    bool may_come = false;
  };
  CarriedOut carried_out();

  // Hands out everything but what is `held`: operations in flight on those slots.
  std::deque<std::shared_ptr<Work>> take_all(const std::function<bool(std::uint32_t)>& held);

  // How many requests were added and not yet given to settle(). Any thread; acquire: what the settled ones have written
  // is visible.
  std::size_t count() const { return count_.load(std::memory_order_acquire); }
  void settle() {
    settled_.store(settled_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);  // publishes nothing
    count_.fetch_sub(1, std::memory_order_release);                                           // Release: see count().
  }
  // How many were. Any thread.
  std::uint64_t settled() const { return settled_.load(std::memory_order_relaxed); }

  // Announces what found no free slot. Slots also become free by the completions of other ranks, which nobody tells us
  // about.
  void retry_slots();
  bool waits_for_slots() const { return !waiting_for_slot_.empty(); }

  // Raises the alarm when a rank that has left will never announce what this rank waits for.
  void check_left();

  // Marks all requests as waited for.
  void wait_for_all();

  // What has waited for longer than the timeout, in which this process has run; twice as long where a device has it:
  // `held` tells that of the operation in flight on a slot. `fact`: what to fail the world with, empty: nothing.
  struct Overdue {
    Activity::Wait wait;
    std::string fact;
  };
  Overdue overdue(const EngineOptions& options, const std::function<bool(std::uint32_t)>& held);

  // The announced requests that have waited for at least `age`, counted alike; patient ones too.
  std::vector<Waiting> waiting(std::chrono::nanoseconds age);

  // See TensorTable.
  std::optional<std::vector<Missed>> missed(std::size_t most, bool described) const {
    return table_.missed(most, described);
  }

  // Names: under the empty one what was measured under names that are forgotten (all but about kSlots, those that are
  // not in use). Ends a round, see Rounds.
  EngineStatistics report();

  // Has what is completed here, or taken away, recorded. Ends a round.
  void start_timeline(std::size_t capacity);
  Timeline& timeline() { return timeline_; }

 private:
  // The first request of a name is announced, or waits for a free slot.
  struct Name {
    SlotHandle slot;
    std::deque<std::shared_ptr<Work>> queue;
    Statistics statistics;
  };

  Ready start(Name& name, bool watched = false);
  std::chrono::nanoseconds waited(std::chrono::steady_clock::time_point since,
                                  std::chrono::steady_clock::time_point now) const;
  // What became ready is for the thread that makes progress.
  void tell_progress(const Name& name, Ready ready);
  std::optional<Ready> announce(Name& name, bool watched = false);
  bool is_announced(const Name& name) const;
  void check_left(std::uint32_t slot, const Request& request);
  Blamed blamed_for(std::uint32_t slot);
  void add_late_elsewhere(std::uint32_t slot, std::vector<int>& late) const;
  // By rank: since when overdue() has seen it stopped, if it is.
  using StoppedSince = std::map<int, std::optional<std::chrono::steady_clock::time_point>>;
  void look_whether_stopped(int rank, const StoppedSince& before, std::chrono::steady_clock::time_point now);
  bool is_stopped(int rank) const;
  std::uint32_t chain_of(const std::vector<int>& ranks, std::chrono::steady_clock::time_point now,
                         std::chrono::nanoseconds timeout) const;
  std::string describe_timeout(const Name& name, std::chrono::nanoseconds timeout, const Blamed& blamed,
                               bool is_waited_for, const std::string& line);

  World& world_;
  Alarm& alarm_;
  const Messages& messages_;
  const Standstills& standstills_;
  const int rank_, parties_;
  TensorTable table_;
  std::unordered_map<std::string, Name> names_;
  Statistics forgotten_;
  Rounds rounds_;
  Timeline timeline_;
  std::deque<std::string> waiting_for_slot_;
  StoppedSince stopped_since_;
  // By slot. Written before the announcement, which publishes it to the thread that carries out the schedule.
  struct InFlight {
    Work* work = nullptr;
    Name* name = nullptr;
  };
  std::vector<InFlight> in_flight_;
  std::atomic<std::size_t> count_{0};
  std::atomic<std::uint64_t> settled_{0};  // written by one thread at a time
};

}  // namespace kvstore_hvd
