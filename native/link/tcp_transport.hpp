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
  struct Operation {
    int host, tag;
    bool is_send;
    char* data;
    std::size_t bytes;
    bool is_over = false;
  };
  struct Header {
    std::uint64_t tag, bytes;
  };
  struct Outgoing {
    Header header;
    Operation* operation;
    std::size_t done = 0;  // bytes, the header's too
  };
  struct Early {
    std::vector<char> bytes;
    bool is_complete = false;
  };
  struct Peer {
    int socket = -1;
    std::string fault;  // why the connection has ended
    bool is_told = false;
    std::deque<Outgoing> records, bulk;  // records go before bulk, between two messages
    std::array<std::deque<Operation*>, kTags> posted;
    std::array<std::deque<Early>, kTags> early;
    // The message that is being received. Its rest goes to `at`; the operation is none while the message is early.
    Header header;
    std::size_t header_bytes = 0;
    Operation* into = nullptr;
    char* at = nullptr;
    std::size_t rest = 0;
  };

  Peer& peer(int host) { return peers_[static_cast<std::size_t>(host)]; }
  void write(Peer& peer);
  void read(int host);
  void take(Peer& peer, const char* bytes, std::size_t count);
  void begin(Peer& peer);
  void finish(Peer& peer);
  void hand_over(Early& early, Operation& operation);
  static void end(Peer& peer, const std::string& fault);

  std::vector<Peer> peers_;
  bool has_received_ = false;
};

}  // namespace kvstore_hvd
