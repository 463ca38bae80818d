// Operations on the arrays of devices, between the schedule and the device thread.
//
// The ranks agree on names, order and batches as on any other operation. The device thread of the process takes the
// batches in that order, hands them to the device, and ends each. An operation stays pending until then, also when the
// world is lost: the device may still write.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

#include "request/request.hpp"

namespace kvstore_hvd {

struct DeviceOperation {
  std::uint32_t slot;
  std::string name, label;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::size_t count, contributed;
  std::vector<Part> parts;
};

// Operations of one collective, dtype, reduction and root.
struct DeviceBatch {
  std::uint64_t number = 0;
  Collective collective = Collective::kAllreduce;
  Reduction reduction;
  int root = 0;
  std::vector<DeviceOperation> operations;
};

// Any thread.
class DeviceQueue {
 public:
  DeviceQueue(World& world, int rank) : world_(world), rank_(rank) {}

  // ---- The engine's side.

  void put(DeviceBatch batch);

  // A slot whose operation is done. Called at every step of the pipeline: takes no lock where there is none.
  std::optional<std::uint32_t> take_finished();
  // Relaxed: a hint; the bell is rung after one was added.
  bool has_finished() const { return finished_count_.load(std::memory_order_relaxed) != 0; }

  // Whether the device may still read or write the arrays of this slot's operation.
  bool holds(std::uint32_t slot) const;

  // The world is lost: drops the batches that are not taken. Those that are count as done after `limit`, in case the
  // device thread does not end them.
  void give_up(std::chrono::nanoseconds limit);

  // Whether the devices of the other ranks are through with this rank's memory, so that it may be released. A batch
  // that is done here may still be under way there. `is_dead`: whether a rank's process is gone.
  bool others_are_through(const std::function<bool(int)>& is_dead) const;

  void close();  // take() returns nothing from now on

  // ---- The device thread's side.

  // The next batch, as soon as there is one. Nothing after `limit`, and once the queue is given up or closed.
  std::optional<DeviceBatch> take(std::chrono::nanoseconds limit);

  // The device does not touch the batch's arrays any more. Returns false for one that was not taken.
  bool done(std::uint64_t number);

 private:
  bool is_late() const { return patience_ && patience_->is_over(); }

  World& world_;
  const int rank_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t next_ = 0;
  std::deque<DeviceBatch> waiting_;
  std::map<std::uint64_t, std::vector<std::uint32_t>> slots_;  // of each batch that is waiting or taken
  std::deque<std::uint32_t> finished_;
  std::atomic<std::size_t> finished_count_{0};  // written under mutex_
  bool is_given_up_ = false, is_closed_ = false;
  mutable std::optional<Patience> patience_;  // once it is given up; under mutex_
};

}  // namespace kvstore_hvd
