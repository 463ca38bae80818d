// Operations on the arrays of devices, on their way from the schedule to the thread that carries them out.
//
// The ranks agree on them like on any other: names, order, and what is carried out together as one batch. The bytes are
// not the engine's: this process's device thread takes the batches in that order, hands them to the device, and says
// when each is done. An operation stays pending until then, also when the world is lost: the device may still write.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/running_time.hpp"
#include "request/request.hpp"
#include "shm/world.hpp"

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

  // A slot whose operation is done. Asked at every step of the pipeline: takes no lock where there is none.
  std::optional<std::uint32_t> take_finished();
  // Relaxed: only whether to look, and whoever adds one rings the bell afterwards.
  bool has_finished() const { return finished_count_.load(std::memory_order_relaxed) != 0; }

  // Whether the device may still read or write the arrays of this slot's operation.
  bool holds(std::uint32_t slot) const;

  // The world is lost: what the device thread has not taken, it will not get, and what it has taken it shall end. After
  // `limit` that is taken for done: a thread that does not answer cannot keep everybody waiting.
  void give_up(std::chrono::nanoseconds limit);

  // Whether the devices of the other ranks are through with all in which this rank's memory has a part: only then may
  // it be given back. A batch that is done here may still be under way there. `is_dead` tells of ranks whose processes
  // are gone, and with them what their devices do.
  bool others_are_through(const std::function<bool(int)>& is_dead) const;

  // Nobody will ask for batches any more.
  void close();

  // ---- The device thread's side.

  // The next batch, as soon as there is one. Nothing after `limit`, and once the queue is given up or closed.
  std::optional<DeviceBatch> take(std::chrono::nanoseconds limit);

  // What was taken is over: the device does not touch the arrays any more. Returns false for one that is not out.
  bool done(std::uint64_t number);

 private:
  bool is_late() const { return patience_ && patience_->is_over(); }

  World& world_;
  const int rank_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t next_ = 0;
  std::deque<DeviceBatch> waiting_;
  std::map<std::uint64_t, std::vector<std::uint32_t>> taken_;  // the slots of each
  std::unordered_set<std::uint32_t> held_;
  std::deque<std::uint32_t> finished_;
  std::atomic<std::size_t> finished_count_{0};  // written under mutex_
  bool is_given_up_ = false, is_closed_ = false;
  mutable std::optional<Patience> patience_;  // once it is given up; under mutex_
};

}  // namespace kvstore_hvd
