// The thread that notices lost ranks and passed deadlines, and makes sure that a failure reaches what is pending.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/running_time.hpp"
#include "engine/engine_state.hpp"
#include "engine/progress.hpp"
#include "shm/liveness.hpp"

namespace kvstore_hvd {

class Watcher {
 public:
  // Has this rank join its world, and starts the thread.
  Watcher(EngineState& state, Progress& progress);
  ~Watcher() { stop(); }
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // Whether the rank's process is gone. Relaxed: only whether to wait on.
  bool is_dead(int rank) const { return dead_[static_cast<std::size_t>(rank)].load(std::memory_order_relaxed); }

  void stop();

 private:
  void watch();
  void look_after_link();
  void look_after_pending();
  void tell(Activity::Wait wait);

  EngineState& state_;
  Progress& progress_;
  Liveness liveness_;
  std::vector<std::atomic<bool>> dead_;  // by rank; written by the thread
  std::uint32_t link_steps_ = 0;
  std::optional<Patience> link_patience_;
  std::string told_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace kvstore_hvd
