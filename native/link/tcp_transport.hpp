// Messages between hosts over one TCP connection to each. Bytes go from the sender's memory to the kernel, and from
// there into the memory of the receive that is posted; a message without one is kept until it is.
//
// A connection that ends is the loss of its host. It is told by test() of a receive of records, once, after all that
// came before: links test that receive at every step, which also moves what has arrived.
#pragma once

#include <array>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "link/transport.hpp"

namespace kvstore_hvd {

class TcpTransport final : public Transport {
 public:
  // `connections`: sockets by host, -1 for this one; they are owned.
  explicit TcpTransport(const std::vector<int>& connections);
  ~TcpTransport() override;
  TcpTransport(const TcpTransport&) = delete;
  TcpTransport& operator=(const TcpTransport&) = delete;

  Transfer send(int host, int tag, const void* data, std::size_t bytes) override;
  Transfer receive(int host, int tag, void* data, std::size_t bytes) override;
  bool test(Transfer& transfer) override;
  // Also gives up what is being sent to that host: a link cancels when it is over.
  void cancel(const Transfer& transfer) override;
  void progress() override;
  bool has_received() override { return std::exchange(has_received_, false); }

  // Closes the sockets of all transports of this process: in a forked child, whose parent alone uses them.
  static void close_all();

 private:
  struct Header {
    std::uint64_t tag, bytes;
  };
  // A send or a receive.
  struct Message {
    Header header;  // of a receive: how much there is room for
    char* data;
    int host;
    bool is_send;
    bool is_over = false;
    std::size_t sent = 0;  // bytes, the header's too

    std::size_t unsent() const { return sizeof(Header) + header.bytes - sent; }
  };
  struct Peer {
    int socket = -1;
    std::string fault;  // why the connection has ended
    bool is_told = false;
    std::deque<Message*> outgoing;  // what has begun, then records, then bulk
    // A tag has receives that wait, or messages that came before their receives.
    std::array<std::deque<Message*>, kTags> receives;
    std::array<std::deque<std::vector<char>>, kTags> early;
    // What is being read goes to `at`, and `rest` bytes of it are missing: a header or, after it, a message.
    Header header;
    bool is_in_message = false;
    char* at = reinterpret_cast<char*>(&header);
    std::size_t rest = sizeof(header);
  };

  Peer& peer(int host) { return peers_[static_cast<std::size_t>(host)]; }
  static void write(Peer& peer);
  void read(Peer& peer);
  static void advance(Peer& peer, std::size_t bytes);
  static void begin(Peer& peer);
  static void take_early(Peer& peer, Message& receive);
  static void end(Peer& peer, const std::string& fault);

  std::vector<Peer> peers_;  // they stay where they are
  bool has_received_ = false;
};

}  // namespace kvstore_hvd
