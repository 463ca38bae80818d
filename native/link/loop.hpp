// The thread that serves the links of this process: of the world of all, and of process sets whose first worker on this
// host it is; and the doorbell that wakes it.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <mutex>
#include <set>

#include "link/link.hpp"

namespace kvstore_hvd {

// The thread sleeps on two kinds of sources: a datagram socket, to which ranks of its host send a byte when they ring
// (World::link_number is its name), and the TCP connections of the process, which an MPI has over Ethernet. MPI does
// not tell its connections, so they are found by searching the process's descriptors. It also polls now and then: often
// as long as messages come without waking it, as over InfiniBand. After many wake-ups without a message it ignores the
// connections that are readable: they belong to the user's program.
class Doorbell {
 public:
  Doorbell();
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  // Never 0.
  std::uint64_t number() const { return number_; }
  // Until a rank rings or, if something is under way (`is_busy`), a connection has news; 10 ms at most. `found_news`:
  // whether a message has moved since the last call.
  void sleep(bool is_busy, bool found_news);

  // There are new links, and with them connections.
  void expect_connections();

  // From any process of this host. Neither waits nor fails: a thread that is gone needs no waking.
  static void ring(std::uint64_t number);

 private:
  enum class Woken { kNot, kByRing, kByConnection };
  void learn(bool found_news);
  void find_connections();
  void ignore_readable();
  Woken wait(std::chrono::nanoseconds limit);

  std::uint64_t number_;
  int socket_, readable_, writable_;
  Clock::time_point begun_ = Clock::now();
  Clock::time_point next_search_ = begun_, last_news_ = begun_;
  bool hears_ = false;  // whether the last sleep heard connections
  Woken woken_ = Woken::kNot;
  int vain_ = 0;  // wake-ups in a row without a message
  std::set<int> ignored_;
  std::chrono::nanoseconds look_;
};

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
  std::condition_variable changed_;  // the members below
  std::vector<std::shared_ptr<Link>> links_;
  bool is_running_ = false, stops_ = false;
  std::vector<std::shared_ptr<Link>> closing_;  // the thread's: over, with messages under way
};

}  // namespace kvstore_hvd
