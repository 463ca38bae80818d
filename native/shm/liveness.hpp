// Watches the processes of the other ranks, through pidfds: unlike kill(pid, 0) they tell a dead process from a zombie,
// and never mistake another process for it. A rank counts as dead only when that is proved; a process for which no
// descriptor is left is looked at again.
#pragma once

#include <functional>

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

  // Waits up to `limit` for interrupt() or the death of a rank that had not left; each death is reported once.
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
    bool ignored = false;  // reported, or left: no longer watched
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

// What the kernel says of a process behind a pidfd (PIDFD_GET_INFO, Linux 6.15).
struct ExitAnswer {
  enum Kind {
    kKnown,   // `status` is that of waitpid(2)
    kNotYet,  // it waits for its parent, who reaps it any moment now, or a little later on a busy machine
    kNever,   // this kernel does not know, or may not tell
  };
  Kind kind = kNever;
  int status = 0;
};

ExitAnswer ask_kernel(int pidfd);

// How a process ended: "died (SIGKILL)", "exited with code 3"; "died" where it is not known. Asks `kernel` for about
// 0.3 s while it has no answer yet. `zombie` is the status in the process table (0: unknown), or nothing once the
// process is no longer there.
std::string describe_end(const std::function<ExitAnswer()>& kernel, const std::function<std::optional<int>()>& zombie);

}  // namespace kvstore_hvd
