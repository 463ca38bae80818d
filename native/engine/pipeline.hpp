// Carries out the schedule: moves one rank's share of the bytes of every entry.
//
// An entry goes through three stages on every rank; while one is filled, the last is reduced, the one before collected:
//
//   fill     put this rank's contribution where the others can read it, and say so (`filled`)
//   reduce   read the others' contributions, and say so (`reduced`)
//   collect  complete this rank's results
//
// The algorithm says what is done in each, see algorithms/. An entry for devices only fills their queue; it is complete
// when they say so. Staging memory holds kStages entries, used in turn.
#pragma once

#include <array>
#include <functional>

#include "engine/algorithms/algorithm.hpp"
#include "engine/device_queue.hpp"
#include "engine/schedule.hpp"

namespace kvstore_hvd {

class Pipeline {
 public:
  // `finished` is called when a slot's operation is done on this rank, or has failed: the slot says which.
  Pipeline(World& world, Alarm& alarm, const Pending& pending, DeviceQueue& devices,
           std::function<void(std::uint32_t)> finished);

  // Does the next piece of work, or waits for the ranks that it depends on, as the policy says but no longer than
  // kMaxSleep. Returns false when there is nothing under way and nothing to begin. Throws WorldLost.
  bool advance(const WaitPolicy& policy);

  // As advance(), once the world is lost: completes scheduled entries whose data is already here, and begins nothing.
  // The rank that lost the world may have completed them before.
  bool drain(const WaitPolicy& policy) {
    chunk_.is_lost = true;
    return world_.has_link() ? drain_arrived(policy) : advance(policy);
  }

  // Whether something is under way or could begin.
  bool has_work() const {
    return (fetched_ != collected_ && !waits_for_link()) || schedule_.available(static_cast<std::uint32_t>(fetched_)) ||
           world_.rank(rank_).inbox.get(taken_).has_value() || devices_.has_finished();
  }

  // Hands the result of an inline reduction to this rank's request on the slot. From any thread.
  void take_inline_result(std::uint32_t slot);

  // Bytes of this rank's arrays that were reduced where they lie. From any thread.
  std::uint64_t bytes_in_place() const { return bytes_in_place_.load(std::memory_order_relaxed); }

  // Whether what is waited for takes the link far longer than it takes to wake a sleeper. The link may need the core.
  bool waits_long() const {
    return fetched_ != collected_ && waits_for_link() && window_[collected_ % kWindow].staged_bytes >= kLong;
  }

 private:
  static constexpr std::uint32_t kLong = 256 << 10;  // bytes: a whole chunk takes 100 us and more
  bool drain_arrived(const WaitPolicy& policy);
  // The stages of an entry. Each waits before it touches anything; false: the others are not there yet, ask again.
  bool fill(std::uint64_t index);
  bool reduce_entry(std::uint64_t index);
  bool collect(std::uint64_t index);
  // Completes the operations of which `entry` has the last bytes.
  void deliver(const Entry& entry);
  // Makes it chunk_'s entry.
  const Steps& turn_to(std::uint64_t index);
  void sum_devices(const Entry& entry);
  void hand_over(const Entry& entry);
  bool are_all_at(Flag RankState::* flag, std::uint64_t target);
  void copy_to_other_outputs(const Piece& piece);
  // Whether all that is under way waits for the link, which rings the bell when an entry has arrived.
  bool waits_for_link() const {
    return world_.has_link() && fetched_ == reduced_ &&
           !world_.link().filled.reached(static_cast<std::uint32_t>(collected_ + 1));
  }
  Entry& entry(std::uint64_t index) { return window_[index % kWindow]; }

  Alarm& alarm_;
  World& world_;
  const int rank_ = alarm_.rank();
  Schedule schedule_{world_, alarm_};
  WaitPolicy policy_;  // of the thread that makes progress at the moment
  const Pending& pending_;
  DeviceQueue& devices_;
  const std::function<void(std::uint32_t)> finished_;

  // How many entries may be under way: as many as have staging memory, or over hosts link memory.
  static constexpr std::uint64_t kWindow = kLinkSlots;
  static_assert(kWindow >= kStages);
  const std::uint64_t depth_ = world_.has_link() ? kLinkSlots : kStages;
  std::array<Entry, kWindow> window_;
  // Entries so far: collected_ <= reduced_ <= filled_ <= fetched_ <= collected_ + depth_. In 64 bits, since the place
  // in the window is taken modulo a number that does not divide 2^32; flags count modulo 2^32.
  std::uint64_t fetched_ = 0, filled_ = 0, reduced_ = 0, collected_ = 0;
  std::uint32_t taken_ = 0;                       // from the inbox, modulo 2^32
  std::atomic<std::uint64_t> bytes_in_place_{0};  // Relaxed: publishes nothing.
  Chunk chunk_{world_, rank_, pending_};          // the entry that is worked at
};

}  // namespace kvstore_hvd
