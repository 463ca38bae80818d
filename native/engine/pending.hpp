// The pending requests of one rank, queued under their names, the first of each name announced; and the engine's
// options.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>

#include "engine/tensor_table.hpp"
#include "report/flight.hpp"

namespace kvstore_hvd {

// What a process is doing, for the other ranks of each of its worlds. Any thread.
class Activity {
 public:
  struct Wait {
    std::uint32_t ranks = 0;  // see Doing::waits
    std::string operation;
  };

  // A thread in a call of MXNet, and whether the call was under way at the last sample.
  using Caller = std::pair<unsigned long, bool>;

  // The line of the program, and the threads in calls of MXNet: sampled twice a second.
  void set_line(std::string line, const std::vector<Caller>& callers) {
    const auto now = Clock::now();
    std::map<unsigned long, Clock::time_point> all;
    const std::lock_guard<std::mutex> lock(mutex_);
    line_ = std::move(line);
    told_ = now;
    for (const auto& [thread, is_same] : callers) {
      const auto before = callers_.find(thread);
      all[thread] = is_same && before != callers_.end() ? before->second : now;
    }
    callers_ = std::move(all);
  }
  // The first sample of the longest call of MXNet under way, if any and if samples come: not while a thread keeps the
  // GIL.
  std::optional<Clock::time_point> in_mxnet_since(Clock::time_point now) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::optional<Clock::time_point> first;
    if (now - told_ > kRecent) return first;
    for (const auto& [thread, since] : callers_) first = std::min(first.value_or(since), since);
    return first;
  }
  std::string line() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return line_;
  }
  // Sets how it waits in one of its worlds. Returns the longest wait in all of them, and a text.
  std::pair<std::uint32_t, std::string> set_wait(const void* world, Wait wait) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_[world] = std::move(wait);
    const auto less = [](const auto& a, const auto& b) { return a.second.ranks < b.second.ranks; };
    const Wait& longest = std::max_element(waits_.begin(), waits_.end(), less)->second;
    std::string text = line_.empty() ? "" : "at " + line_;
    if (!longest.operation.empty()) text += (text.empty() ? "in " : ", in ") + longest.operation;
    return {longest.ranks, std::move(text)};
  }
  void leave(const void* world) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_.erase(world);
  }

 private:
  static constexpr std::chrono::seconds kRecent{5};

  std::mutex mutex_;
  std::string line_;
  Clock::time_point told_;
  std::map<unsigned long, Clock::time_point> callers_;  // by thread: the first sample of its call
  std::map<const void*, Wait> waits_;
};

struct EngineOptions {
  // How long a request may wait for the other ranks, and a rank for another inside a collective.
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  // Wait longer for ranks that neither are stopped nor wait for others themselves.
  bool waits_for_busy = false;
  // Shared by the engines of the process.
  std::shared_ptr<Activity> activity = std::make_shared<Activity>();
  // Watch the other ranks' processes; off when the ranks are threads of one process.
  bool watch_peers = true;
  // How messages name this machine.
  std::string host;
};

// One thread at a time, unless a member says otherwise. A lost world ends calls here silently: the thread that makes
// progress finds the failure and fails all requests.
class Pending {
 public:
  Pending(World& world, Alarm& alarm, const Messages& messages, const Standstills& standstills)
      : world_(world), alarm_(alarm), messages_(messages), standstills_(standstills) {}

  // Queues the request; it is announced once those of its name before it are over. Returns whether that made it ready,
  // this rank being the last: kAlone when this rank can carry it out by itself, kDone when it has (take_inline() is
  // next). Every bell but this rank's own has been rung then.
  enum class Ready { kNot, kTogether, kAlone, kDone };
  struct Added {
    Ready ready = Ready::kNot;
    std::uint32_t slot = kNoSlot;  // unless it is not announced
  };
  // `watched`: if it is announced now, a thread will watch its mark, see TensorTable.
  Added add(std::shared_ptr<Work> work, bool watched);

  // The request that this rank has in flight on a slot. For the thread that carries out the schedule, without a lock:
  // it learns of the slot from the announcement.
  const Request& request_on(std::uint32_t slot) const { return in_flight_[slot].work->request(); }

  // Whether the operation on `slot` is that of `work`, and not completed. Not once the world is lost.
  bool is_in_flight(std::uint32_t slot, const Work& work) const { return in_flight_[slot].work == &work; }

  // Whether every rank has announced it, or it is over.
  bool is_met(const Work& work);

  // Notes times for reports: the entry is scheduled; all of it has arrived from other hosts. As request_on().
  void scheduled(const Entry& entry) const;
  void arrived(const Entry& entry, const World::OnLink& times) const;

  // The operation on `slot` is over on this rank: returns work and status, and announces the next of its name.
  struct Completed {
    std::shared_ptr<Work> work;
    Status status;
  };
  Completed complete(std::uint32_t slot, Clock::time_point now);

  // Once the world is lost: the slots of this rank's operations that other ranks have reduced inline, and whether one
  // may be doing so at this moment.
  struct CarriedOut {
    std::vector<std::uint32_t> slots;
    bool may_come = false;
  };
  CarriedOut carried_out();

  // Returns all works but those in flight on slots that are `held`, and forgets them.
  std::deque<std::shared_ptr<Work>> take_all(const std::function<bool(std::uint32_t)>& held);

  // Requests added and not yet settled. Any thread; acquire: what the settled ones have written is visible.
  std::size_t count() const { return count_.load(std::memory_order_acquire); }
  void settle() {
    settled_.store(settled_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);  // publishes nothing
    count_.fetch_sub(1, std::memory_order_release);                                           // Release: see count().
  }
  // Any thread.
  std::uint64_t settled() const { return settled_.load(std::memory_order_relaxed); }

  // Announces requests that found no free slot. Completions of other ranks free slots, too, without a notice.
  void retry_slots();
  bool waits_for_slots() const { return !waiting_for_slot_.empty(); }

  // Raises the alarm when a rank that has left will never announce what this rank waits for.
  void check_left();

  // Marks all requests as waited for.
  void wait_for_all();

  // What has waited for longer than the timeout, while this process ran; twice as long where a device holds the
  // operation of a slot (`held`). `fact`: what to fail the world with; empty: nothing.
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

  // By name; under the empty one that of forgotten names (beyond kSlots). Ends a round, see Rounds.
  EngineStatistics report();

  // See Rounds.
  void look(bool is_blocked) { rounds_.look(is_blocked); }

  // Records operations from now on. Ends a round.
  void start_timeline(std::size_t capacity);
  Timeline& timeline() { return timeline_; }

 private:
  // The first request of a name is announced, or waits for a free slot.
  struct Name {
    SlotHandle slot;
    std::deque<std::shared_ptr<Work>> queue;
    Statistics statistics;
    bool is_used = false;  // again, since forget_names() looked at it
  };

  Ready start(Name& name, bool watched = false);
  std::chrono::nanoseconds waited(Clock::time_point since, Clock::time_point now) const;
  void record(const Name& name);
  void forget_names();
  void tell_progress(const Name& name, Ready ready);
  std::optional<Ready> announce(Name& name, bool watched = false);
  bool is_announced(const Name& name) const;
  void check_left(std::uint32_t slot, const Request& request);
  Blamed blamed_for(std::uint32_t slot);
  void add_late_elsewhere(std::uint32_t slot, std::vector<int>& late) const;
  // By rank: since when overdue() has seen it stopped, if it is.
  using StoppedSince = std::map<int, std::optional<Clock::time_point>>;
  void look_whether_stopped(int rank, const StoppedSince& before, Clock::time_point now);
  bool is_stopped(int rank) const;
  std::uint32_t chain_of(const std::vector<int>& ranks, Clock::time_point now, std::chrono::nanoseconds timeout) const;
  std::string describe_timeout(const Name& name, std::chrono::nanoseconds timeout, const Blamed& blamed,
                               bool is_waited_for, const std::string& line);

  World& world_;
  Alarm& alarm_;
  const Messages& messages_;
  const Standstills& standstills_;
  const int rank_ = alarm_.rank(), parties_ = world_.parties;
  TensorTable table_{world_, alarm_};
  std::unordered_map<std::string, Name> names_;
  std::deque<std::string> known_;  // the names, in the order in which forget_names() looks at them
  Statistics forgotten_;
  Rounds rounds_{world_.member(world_.rank(rank_).rank_of_world).counts.waited};
  Timeline timeline_;
  FlightRecorder flight_{world_, rank_};
  std::deque<std::string> waiting_for_slot_;
  StoppedSince stopped_since_;
  // By slot. Written before the announcement, which publishes it to the thread that carries out the schedule.
  struct InFlight {
    Work* work = nullptr;
    Name* name = nullptr;
  };
  std::vector<InFlight> in_flight_ = std::vector<InFlight>(kSlots);
  std::atomic<std::size_t> count_{0};
  std::atomic<std::uint64_t> settled_{0};  // written by one thread at a time
};

}  // namespace kvstore_hvd
