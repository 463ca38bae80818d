// The thread that serves the links of this process: of the world of all, and of process sets whose first worker on this
// host it is.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "base/process.hpp"
#include "link/link.hpp"
#include "shm/doorbell.hpp"

namespace kvstore_hvd {

class LinkLoop {
 public:
  // That of this process, which is never destroyed: MPI may still use memory of its links when the process ends.
  static LinkLoop& of_this_process();

  // Serves the link until it is over and none of its messages is under way.
  void add(const std::shared_ptr<Link>& link);
  // Serves no link any longer: once all are over, or `limit` has passed. Returns whether they were over, and the thread
  // has ended: it may stand still in MPI.
  bool stop(std::chrono::nanoseconds limit);

 private:
  LinkLoop() = default;
  void run();

  const pid_t owner_ = process_id();
  Doorbell doorbell_;
  std::mutex mutex_;
  std::condition_variable changed_;  // what follows
  std::vector<std::shared_ptr<Link>> links_;
  bool is_running_ = false, stops_ = false;
  std::vector<std::shared_ptr<Link>> closing_;  // the thread's: over, with messages under way
};

}  // namespace kvstore_hvd
