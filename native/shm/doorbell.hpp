// What wakes the thread that serves the links of a process: it sleeps until a rank of its host rings, or bytes move on
// a TCP connection of the process, which an MPI has over Ethernet. It also looks now and then: often as long as
// messages come without waking it, as over InfiniBand.
#pragma once

#include <chrono>
#include <cstdint>
#include <set>

namespace kvstore_hvd {

class Doorbell {
 public:
  Doorbell();
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  // Never 0.
  std::uint64_t number() const { return number_; }
  // Until somebody rings or, if something is under way (`is_busy`), a connection has news; not for long. `found_news`:
  // whether something has moved since the last call.
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
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point next_search_ = begun_, last_news_ = begun_;
  // Of the last sleep, and what was learnt.
  bool hears_ = false;
  Woken woken_ = Woken::kNot;
  int vain_ = 0;
  std::set<int> ignored_;
  std::chrono::nanoseconds look_;
};

}  // namespace kvstore_hvd
