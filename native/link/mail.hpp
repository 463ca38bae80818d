// The records that one link exchanges with another: a stream of bytes each way, of which one message each way is under
// way at a time. What is written meanwhile goes together with the next.
//
// Both ends draw a random number and learn the other's before anything of the stream is sent. Messages that an earlier
// attempt of the other end has left behind, or that were sent to an earlier one of this end, are dropped.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>
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

  // From kMet on both ends have met.
  enum class Peer { kUnknown, kOtherBuild, kMet, kStartedOver };
  // From any thread. Relaxed: nothing else depends on it. Who has seen a failure that the other end told sees that both
  // have met: setting a failure is a release.
  Peer peer() const { return peer_.load(std::memory_order_relaxed); }

  // Sends what has been appended to outgoing(), once both ends have met, and receives, without waiting; calls `handle`
  // with each record that is complete. Returns whether anything has moved. Throws ForeignRecord.
  using Handle = std::function<void(RecordKind, RecordReader)>;
  bool progress(const Handle& handle);
  std::vector<char>& outgoing() { return outgoing_; }
  // Whether nothing waits to be sent, or nobody is there to receive it.
  bool has_sent_all() const { return peer() != Peer::kMet || !(has_outgoing() || sending_ != 0); }
  // Sends this end's number again, unless both ends have met.
  void greet() { greets_ = greets_ || peer() == Peer::kUnknown; }

  // Whether a message has come since the last call.
  bool has_received() { return std::exchange(has_received_, false); }
  // What comes is dropped from now on.
  void ignore() { is_ignored_ = true; }

  // Receives and sends nothing more. Returns whether nothing is under way: else to be called again.
  bool close();

 private:
  // Begins each message; the rest is of the stream.
  struct Head {
    std::uint64_t build, from, to, bytes;  // `to`: 0 before the sender knows the number
  };
  static constexpr std::size_t kMessage = std::size_t{68} << 10;

  bool has_outgoing() const { return outgoing_.size() > sizeof(Head); }
  bool send();
  bool receive(const Handle& handle);
  void read(std::size_t bytes, const Handle& handle);
  bool is_for_us(const Head& head);

  Transport& transport_;
  const int host_;
  const std::uint64_t build_, own_;
  std::uint64_t other_ = 0;
  std::atomic<Peer> peer_{Peer::kUnknown};
  bool greets_ = true;
  std::vector<char> outgoing_ = std::vector<char>(sizeof(Head));  // the rest of the stream, behind the place of a head
  std::vector<char> begun_;                                       // a record whose end has not come
  std::vector<char> sent_, received_ = std::vector<char>(kMessage), read_ = received_;  // a message each
  Transport::Transfer sending_ = 0, receiving_ = 0;
  bool has_received_ = false, is_ignored_ = false, is_closed_ = false;
};

}  // namespace kvstore_hvd
