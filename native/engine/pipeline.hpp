// Carries out the schedule: moves one rank's share of the bytes of every entry, through staging memory.
//
// An entry goes through three stages on every rank; while one entry is filled, the one before is reduced, and the one
// before that collected:
//
//   fill     copy this rank's contribution into its own staging memory, and say so (`filled`)
//   reduce   one-shot: reduce everybody's contribution into the output
//            two-shot: reduce one slice, and write the result back into the staging memory of every rank
//            broadcast: copy the root's staging memory into the output
//            exchange: copy the parts that this rank takes into the output
//            reduce-scatter: reduce the part that this rank receives into the output
//            direct: reduce the parts that nobody has claimed, from all arrays into all arrays
//            and say so (`reduced`)
//   collect  two-shot: copy the other slices from this rank's own staging memory into the output
//            direct: wait for the parts that others have claimed
//
// Of an entry for devices nothing is filled but their queue; it is complete when they say so.
//
// In the two-shot each staging line moves between two cores exactly twice and is never shared for reading: rewriting a
// line that other cores hold copies of costs more. Staging memory holds kStages entries, used in turn.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/device_queue.hpp"
#include "engine/schedule.hpp"
#include "request/request.hpp"
#include "shm/wait.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

class Pipeline {
 public:
  // `request_of` finds this rank's request for a slot that it announced; `finished` is told when all bytes of a slot's
  // operation are done on this rank (or when it failed: ask the slot); `scheduled` is told of every entry, before
  // anything of it is done.
  Pipeline(World& world, Alarm& alarm, std::function<const Request&(std::uint32_t)> request_of,
           std::function<void(const Entry&)> scheduled, std::function<void(std::uint32_t)> finished,
           DeviceQueue& devices);

  // Does the next piece of work, or waits for the ranks that it depends on, as the policy says but no longer than
  // kMaxSleep. Returns false when there is nothing under way and nothing to begin. Throws WorldLost.
  bool advance(const WaitPolicy& policy);

  // As advance(), once the world is lost: goes on with what all ranks have scheduled, as far as this rank needs nothing
  // more of the others, and begins nothing. Whoever lost the world may have completed it before.
  bool finish(const WaitPolicy& policy) {
    lost_ = true;
    return advance(policy);
  }

  // Whether something is under way or could begin.
  bool has_work() const {
    return fetched_ != collected_ || schedule_.available(static_cast<std::uint32_t>(fetched_)) ||
           world_.rank(rank_).inbox.get(taken_).has_value() || devices_.has_finished();
  }

  // Hands the result of what was carried out inline to this rank's request on the slot. From any thread.
  void take(std::uint32_t slot);

  // Bytes of this rank's arrays that were reduced where they lie. From any thread.
  std::uint64_t bytes_in_place() const { return bytes_in_place_.load(std::memory_order_relaxed); }

 private:
  // The stages. Each waits before it touches anything; false: the others are not there yet, ask again.
  bool fill(const Entry& entry, std::uint64_t index);
  bool reduce_entry(const Entry& entry, std::uint64_t index);
  bool collect(const Entry& entry, std::uint64_t index);
  void sum_devices(const Entry& entry);
  void hand_over(const Entry& entry);
  void reduce_claimed(const Entry& entry, std::uint64_t index);
  void reduce_range(const Entry& entry, std::uint64_t index, std::uint64_t begin, std::uint64_t end);
  void take_parts(const Entry& entry, std::uint64_t index);
  bool wait_all(Flag RankState::* flag, std::uint64_t target) const;
  Entry& entry(std::uint64_t index) { return window_[index % kStages]; }

  World& world_;
  int rank_;
  Schedule schedule_;
  WaitPolicy policy_;  // of the thread that drives at the moment
  std::function<const Request&(std::uint32_t)> request_of_;
  std::function<void(const Entry&)> scheduled_;
  std::function<void(std::uint32_t)> finished_;
  DeviceQueue& devices_;

  bool lost_ = false;  // see finish()

  std::array<Entry, kStages> window_;
  // Entries so far: collected_ <= reduced_ <= filled_ <= fetched_ <= collected_ + kStages. In 64 bits, since the place
  // in the window is taken modulo a number that does not divide 2^32; flags count modulo 2^32.
  std::uint64_t fetched_ = 0, filled_ = 0, reduced_ = 0, collected_ = 0;
  std::uint32_t taken_ = 0;                       // from the inbox, modulo 2^32
  std::atomic<std::uint64_t> bytes_in_place_{0};  // Relaxed: publishes nothing.
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace kvstore_hvd
