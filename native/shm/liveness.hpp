// Watches the processes of the other ranks, through pidfds: unlike kill(pid, 0) they tell a dead process from a zombie
// that nobody has reaped, and never mistake another process for it. A rank counts as dead only when that is proved;
// what merely cannot be looked at, because no descriptor is left for it, is looked at again.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "shm/world.hpp"

namespace kvstore_hvd {

class Liveness {
 public:
  // Writes this process into `rank`'s state and marks it joined. With `watch` false, poll() only waits.
  Liveness(World& world, int rank, const std::string& host, bool watch);
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  struct Death {
    int rank;
    std::string how;  // "died (SIGKILL)", "exited with code 3", "died"
  };

  // Waits up to `limit` for interrupt() or for the death of a rank that had not left in good order; each death is
  // reported once.
  std::optional<Death> poll(std::chrono::milliseconds limit);

  // Whether the process of a rank of this host is stopped, by a signal or a debugger.
  static bool is_stopped(World& world, int rank);
  // The ranks of which that is so.
  std::vector<int> stopped() const;

  // Ends a poll() under way, or the next one.
  void interrupt();

  // Whether this system has pidfds. Without, the process table is looked at instead, now and then.
  static bool has_pidfds();

 private:
  struct Peer {
    int pidfd = -1;
    bool settled = false;  // reported, or left: no longer watched
  };

  void open_new_peers();
  std::optional<Death> find_death();

  World& world_;
  int rank_;
  bool watch_;
  bool all_joined_ = false;
  bool all_watched_ = false;  // no pidfd is missing because there was no descriptor for it
  int wake_fd_;
  std::vector<Peer> peers_;
};

}  // namespace kvstore_hvd
