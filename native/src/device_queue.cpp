#include "kvstore_hvd/device_queue.hpp"

#include <utility>

namespace kvstore_hvd {

void DeviceQueue::put(DeviceBatch batch) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    batch.number = next_++;
    for (const DeviceOperation& operation : batch.operations) held_.insert(operation.slot);
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
  return held_.count(slot) != 0 && !is_late();
}

void DeviceQueue::give_up(std::chrono::nanoseconds limit) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_given_up_) return;
    is_given_up_ = true;
    give_up_at_ = Clock::now() + limit;
    for (const DeviceBatch& batch : waiting_) {
      for (const DeviceOperation& operation : batch.operations) held_.erase(operation.slot);
    }
    waiting_.clear();
  }
  changed_.notify_all();
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
  std::vector<std::uint32_t>& slots = taken_[batch.number];
  for (const DeviceOperation& operation : batch.operations) slots.push_back(operation.slot);
  return batch;
}

bool DeviceQueue::done(std::uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = taken_.find(number);
  if (found == taken_.end()) return false;
  for (const std::uint32_t slot : found->second) {
    held_.erase(slot);
    // Once the world is lost it failed, whatever the device made of it: the others may not have it.
    if (!is_given_up_) finished_.push_back(slot);
  }
  finished_count_.store(finished_.size(), std::memory_order_relaxed);
  taken_.erase(found);
  return true;
}

}  // namespace kvstore_hvd
