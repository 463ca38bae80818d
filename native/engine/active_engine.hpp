// The engine of a rank for as long as it is in its world. The members are those of Engine, which says what they do.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "engine/engine_state.hpp"
#include "engine/lingering.hpp"
#include "engine/progress.hpp"
#include "engine/watcher.hpp"

namespace kvstore_hvd {

class ActiveEngine {
 public:
  ActiveEngine(std::shared_ptr<Segment> segment, int rank, EngineOptions options)
      : state_(std::move(segment), rank, std::move(options)), progress_(state_), watcher_(state_, progress_) {}

  const std::shared_ptr<Segment>& segment() const { return state_.segment; }

  void protect(std::shared_ptr<Arena> arena);
  std::shared_ptr<Work> submit(std::shared_ptr<const Request> request, bool caller_waits);
  void submit(const std::shared_ptr<Work>& work, bool caller_waits);
  std::shared_ptr<Work> submit_and_linger(std::shared_ptr<const Request> request);
  bool wait(Work& work, std::chrono::nanoseconds limit) { return progress_.wait(work, limit, state_.callers_policy); }
  bool wait_briefly(Work& work);
  bool wait_for_all(std::chrono::nanoseconds limit);
  bool is_met(const Work& work);

  void abort(const std::string& text);
  Status health() const;

  std::optional<DeviceBatch> take_batch(std::chrono::nanoseconds limit);
  bool end_batch(std::uint64_t number, const Status& status);

  std::uint64_t bytes_in_place() const { return progress_.bytes_in_place(); }
  EngineStatistics report();
  void start_timeline(std::size_t capacity);
  void stop_timeline();
  TimelineEvents take_timeline();
  std::optional<std::vector<Waiting>> waiting(std::chrono::nanoseconds age);
  std::optional<std::vector<Missed>> missed(std::size_t most, bool described) const;
  Engine::Process process(int rank) const;

  bool shutdown(const std::string& reason);

 private:
  bool await_devices();

  mutable EngineState state_;
  Progress progress_;
  Watcher watcher_;
  Lingering lingering_;
  bool leaving_ = false, left_ = false, gone_ = false;  // under the mutex, as is the next one
  bool are_devices_through_ = true;
  std::condition_variable gone_changed_;  // gone_
};

}  // namespace kvstore_hvd
