#include "engine/device_queue.hpp"

#include <algorithm>

#include "shm/segment.hpp"

namespace kvstore_hvd {

void DeviceQueue::put(DeviceBatch batch) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    batch.number = next_++;
    std::vector<std::uint32_t>& slots = slots_[batch.number];
    for (const DeviceOperation& operation : batch.operations) slots.push_back(operation.slot);
    waiting_.push_back(std::move(batch));
  }
  changed_.notify_all();
}

std::optional<std::uint32_t> DeviceQueue::take_finished() {
  if (!has_finished()) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_.empty()) return std::nullopt;
  const std::uint32_t slot = finished_.front();
  finished_.pop_front();
  finished_count_.store(finished_.size(), std::memory_order_relaxed);
  return slot;
}

bool DeviceQueue::holds(std::uint32_t slot) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto has = [slot](const auto& batch) {
    return std::find(batch.second.begin(), batch.second.end(), slot) != batch.second.end();
  };
  return !is_late() && std::any_of(slots_.begin(), slots_.end(), has);
}

void DeviceQueue::give_up(std::chrono::nanoseconds limit) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_given_up_) return;
    is_given_up_ = true;
    patience_.emplace(limit);
    for (const DeviceBatch& batch : waiting_) slots_.erase(batch.number);
    waiting_.clear();
  }
  changed_.notify_all();
}

bool DeviceQueue::others_are_through(const std::function<bool(int)>& is_dead) const {
  // Relaxed: this process's own, and ordered by the thread that ended the last one.
  const std::uint32_t own = world_.rank(rank_).batches_ended.load(std::memory_order_relaxed);
  if (own == 0) return true;
  // In a lost world the ranks may have begun different batches.
  const bool is_lost = world_.failure.is_set();
  for (int r = 0; r < world_.ranks; ++r) {
    const RankState& other = world_.rank(r);
    // Acquire: what the other device has read, it has read before this rank goes on.
    if (r == rank_ || other.presence.load(std::memory_order_acquire) == Presence::kLeft || is_dead(r)) continue;
    const std::uint32_t ended = other.batches_ended.load(std::memory_order_acquire);
    // The signed distance: counts wrap around.
    const bool is_through = is_lost ? ended == other.batches_begun.load(std::memory_order_seq_cst)
                                    : static_cast<std::int32_t>(ended - own) >= 0;
    if (!is_through) return false;
  }
  return true;
}

void DeviceQueue::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = true;
  }
  changed_.notify_all();
}

std::optional<DeviceBatch> DeviceQueue::take(std::chrono::nanoseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, limit, [this] { return !waiting_.empty() || is_given_up_ || is_closed_; });
  if (waiting_.empty()) return std::nullopt;
  DeviceBatch batch = std::move(waiting_.front());
  waiting_.pop_front();
  RankState& own = world_.rank(rank_);
  // Sequentially consistent, as are is_set() and what others_are_through() reads: either a rank that leaves a lost
  // world sees this batch, or this rank sees that the world is lost.
  own.batches_begun.fetch_add(1, std::memory_order_seq_cst);
  if (world_.failure.is_set()) {
    slots_.erase(batch.number);
    own.batches_ended.fetch_add(1, std::memory_order_release);  // as in done()
    return std::nullopt;
  }
  // There may be room for the next one now. Sequentially consistent, as is the count above: either a rank that is woken
  // for a new tensor sees the room, or this rank sees the tensor.
  if (world_.ready_on_device.count.load(std::memory_order_seq_cst) != 0) ring_all(world_);
  return batch;
}

bool DeviceQueue::done(std::uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = slots_.find(number);
  const bool is_waiting = !waiting_.empty() && number >= waiting_.front().number;  // batches are taken in order
  if (found == slots_.end() || is_waiting) return false;
  // Once the world is lost they failed, whatever the device made of them: the others may not have them.
  if (!is_given_up_) finished_.insert(finished_.end(), found->second.begin(), found->second.end());
  finished_count_.store(finished_.size(), std::memory_order_relaxed);
  slots_.erase(found);
  // Release: the device has read its inputs before a rank sees the count.
  world_.rank(rank_).batches_ended.fetch_add(1, std::memory_order_release);
  return true;
}

}  // namespace kvstore_hvd
