// The thread that serves the links of this process: of the world of all, and of process sets whose first worker on this
// host it is.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "link/link.hpp"

namespace kvstore_hvd {

class LinkLoop {
 public:
  // That of this process, which is never destroyed: whatever MPI still has in its hands stays where it is.
  static LinkLoop& of_this_process();

  // Serves the link until it is over and nothing of it is under way.
  void add(const std::shared_ptr<Link>& link);
  // Waits until all other hosts have been heard of on the link, or `limit` has passed; returns the ranks that are
  // missing.
  std::vector<int> meet(const std::shared_ptr<Link>& link, std::chrono::nanoseconds limit);
  // Gives it up.
  void remove(const std::shared_ptr<Link>& link);
  // No link is served any more: once all are over, or `limit` has passed. Returns whether they were.
  bool stop(std::chrono::nanoseconds limit);

 private:
  LinkLoop();
  void run();
  bool serve(const std::vector<std::shared_ptr<Link>>& links);

  const pid_t owner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Link>> links_, removed_;
  bool stopping_ = false, stopped_ = true;
  std::thread thread_;
};

}  // namespace kvstore_hvd
