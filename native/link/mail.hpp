// The records that one link exchanges with another: a stream of bytes each way, of which one message each way is under
// way at a time. What is written meanwhile goes together with the next.
//
// Both ends draw a random number and learn the other's before anything of the stream is sent. Messages that an earlier
// attempt of the other end has left behind, or that were sent to an earlier one of this end, are dropped.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "link/records.hpp"
#include "link/transport.hpp"

namespace kvstore_hvd {

class Mail {
 public:
  // `build`: a hash; hosts that run different versions would not understand each other.
  Mail(Transport& transport, int host, std::uint64_t build);
  Mail(const Mail&) = delete;
  Mail& operator=(const Mail&) = delete;

  enum class Peer { kUnknown, kMet, kOtherBuild, kStartedOver };
  // From any thread. Relaxed, everywhere: nothing else depends on it.
  Peer peer() const { return peer_.load(std::memory_order_relaxed); }
  // Whether both ends have met, whatever became of the other one. Who has seen a failure that the other end told sees
  // this: setting a failure is a release.
  bool was_met() const { return was_met_.load(std::memory_order_relaxed); }

  // What is appended here is sent once the other end is met. Records, see RecordWriter.
  std::vector<char>& outgoing() { return outgoing_; }
  // Sends this end's number, until both ends have met.
  void greet() { greets_ = greets_ || peer() == Peer::kUnknown; }

  // Sends and receives what it can without waiting; calls `handle` with each record that is complete. Returns whether
  // anything has moved.
  bool progress(const std::function<void(const char*)>& handle);

  // What was written until now is all that the other end needs. has_ended(): it is out of our hands.
  void end() {
    if (!end_) end_ = n_sent_ + n_sending_ + outgoing_.size();
  }
  bool has_ended() const { return peer() != Peer::kMet || (end_ && n_sent_ >= *end_); }

  // Receives and sends nothing more. Returns whether nothing is under way: else to be called again.
  bool close();

 private:
  // Begins each message; the rest is of the stream.
  struct Head {
    std::uint64_t build, from, to, bytes;  // `to`: 0 before the sender knows the number
  };
  static constexpr std::size_t kMessage = std::size_t{68} << 10;

  bool send();
  bool receive(const std::function<void(const char*)>& handle);
  bool is_for_us(const Head& head);

  Transport& transport_;
  const int host_;
  const std::uint64_t build_, own_;
  std::uint64_t other_ = 0;
  std::atomic<Peer> peer_{Peer::kUnknown};
  std::atomic<bool> was_met_{false};
  bool greets_ = true;
  std::vector<char> outgoing_, incoming_;
  std::vector<char> sent_, received_;
  std::uint64_t n_sent_ = 0, n_sending_ = 0;  // bytes of the stream
  std::optional<std::uint64_t> end_;
  Transport::Transfer sending_ = 0, receiving_ = 0;
  bool is_closed_ = false;
};

}  // namespace kvstore_hvd
