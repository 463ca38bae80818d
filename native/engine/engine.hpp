// The engine of one rank: takes requests, matches them by name with those of the other ranks of its world, and carries
// them out on a communication thread, highest priority first.
#pragma once

#include <sys/types.h>

#include <mutex>

#include "engine/device_queue.hpp"
#include "engine/pending.hpp"
#include "shm/arena.hpp"

namespace kvstore_hvd {

class Engine {
 public:
  // Joins the world of `segment` as `rank`. Ranks may arrive in any order; nothing here waits for the others.
  Engine(std::shared_ptr<Segment> segment, int rank, EngineOptions options);
  // shutdown() if it was not called.
  ~Engine();

  int rank() const { return rank_; }  // in the world, on all its hosts
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }
  // Null once the world is left.
  std::shared_ptr<Segment> segment() const;
  // As error_prefix() of shm/world.hpp; in a forked child, too.
  const std::string& error_prefix() const { return error_prefix_; }

  // Never sleeps for another rank. When this rank is the last, and the request is small or all arrays lie in arenas, it
  // may take about 0.2 ms to carry the request out. A request that is wrong, or submitted after a failure, is completed
  // with its error before submit returns.
  std::shared_ptr<Work> submit(std::shared_ptr<const Request> request);
  std::shared_ptr<Work> submit(Request request) { return submit(std::make_shared<Request>(std::move(request))); }

  // Once the world is lost, other ranks cannot change this rank's arena: from before a pending operation is failed, so
  // that its arrays can be used again. (A rank that was stopped meanwhile may go on at any time.)
  void protect(std::shared_ptr<Arena> arena);

  // Like submit, for a thread that may stay a little longer: where all ranks have lately submitted at the same time, it
  // stays about 60 us, 120 at most, and completes the request itself if it can. That saves waking the communication
  // thread: three times faster for small arrays, see benchmarks/results/waiting-parts.txt.
  std::shared_ptr<Work> submit_and_linger(std::shared_ptr<const Request> request);
  std::shared_ptr<Work> submit_and_linger(Request request) {
    return submit_and_linger(std::make_shared<Request>(std::move(request)));
  }

  // Until `work` is done or `limit` has passed; returns whether it is done. The calling thread helps to carry out
  // collectives meanwhile. One thread at a time for each work.
  bool wait(Work& work, std::chrono::nanoseconds limit);
  // The same for a few microseconds, without sleeping.
  bool wait_briefly(Work& work);

  // Whether all ranks have submitted it, or it is over. So it is where missed() shows a later operation of a rank.
  bool is_met(const Work& work) const;
  // Bounded by the engine's timeout.
  const Status& wait(Work& work);

  // Until nothing of this rank is pending, or `limit` has passed; returns whether nothing is.
  bool wait_for_all(std::chrono::nanoseconds limit);

  // Like submit, for a caller that waits at once: fastest, as the communication thread is left asleep.
  std::shared_ptr<Work> submit_to_wait(std::shared_ptr<const Request> request);
  // The same once more, after its request is over. Only the caller may use `work` then.
  void submit_to_wait(const std::shared_ptr<Work>& work);
  Status run(Request request) { return wait(*submit_to_wait(std::make_shared<Request>(std::move(request)))); }

  // Fails all pending and later requests of all ranks of the world with kTransport and this text.
  void abort(const std::string& text);

  // For the device thread, see DeviceQueue: the next batch, or nothing after `limit`, when the world is lost or left;
  // and its end: the device does not touch the arrays any more. A failure loses the world. False: it was not taken.
  std::optional<DeviceBatch> take_batch(std::chrono::nanoseconds limit);
  bool end_batch(std::uint64_t number, const Status& status = Status());

  // The latched failure of the world, or ok.
  Status health() const;

  // Bytes of this rank's arrays that were reduced in its arena, in place.
  std::uint64_t bytes_in_place() const;

  // As Pending::report(); empty in a forked child.
  EngineStatistics report() const;

  // Records this rank's operations, see Timeline, and ends a round. take_timeline() returns the events since the last
  // call, also after the shutdown. No effect in a forked child.
  void start_timeline(std::size_t capacity);
  void stop_timeline();
  TimelineEvents take_timeline();

  // The requests of this rank that have been announced for at least `age`, and the ranks they wait for. Never waits:
  // nothing when another thread of this rank has the mutex, where a stopped rank can hold it up. Empty once the world
  // has failed, and in a forked child.
  std::optional<std::vector<Waiting>> waiting(std::chrono::nanoseconds age) const;

  // Operations that others have announced and this rank has not; as waiting(). See TensorTable::missed().
  std::optional<std::vector<Missed>> missed(std::size_t most, bool described = false) const;

  // A rank's process (0: it has not joined, or is on another host), and its name: "rank 2 (node1, pid 8123)".
  struct Process {
    int pid = 0;
    std::string text;
  };
  Process process(int rank) const;

  // Requests of this rank that are over, and that are not. Without a lock.
  std::pair<std::uint64_t, std::size_t> counts() const;

  // See Activity::set_line, and Rounds::look.
  void tell_line(std::string line, const std::vector<Activity::Caller>& callers, bool is_blocked);

  // Leaves the world: waits (bounded by the timeout) until this rank's pending requests are done, then marks it as
  // left. With a non-empty reason (why this rank ends early) pending requests are failed instead, and the others read
  // the reason. Idempotent. Returns false when devices of other ranks may use this one's memory after two seconds.
  //
  // Afterwards, as soon as the last other call has returned, this engine holds nothing of the world. Requests fail with
  // kShutdown, health() and bytes_in_place() stay, the timeline can be taken, and all else is empty.
  bool shutdown(const std::string& reason = "");

 private:
  struct Inner;
  class Visit;

  // Kept when the world is left.
  struct Remains {
    Status health;
    std::uint64_t bytes_in_place = 0;
    bool are_devices_through = true;
    TimelineEvents timeline;
  };

  template <class Call>
  auto with_lock(const Call& call) const;
  bool forked() const;
  Status why_outside(const Request& request) const;
  std::shared_ptr<Work> refuse(std::shared_ptr<const Request> request) const;

  const int rank_, size_, local_rank_;
  const pid_t owner_;
  const std::string error_prefix_;
  mutable Gate gate_;                     // of inner_
  mutable std::unique_ptr<Inner> inner_;  // gone when the gate is closed and no thread is inside
  std::mutex remains_mutex_;
  bool is_left_ = false;
  Remains remains_;  // written once, before the gate is closed; the timeline's: under the mutex
};

}  // namespace kvstore_hvd
