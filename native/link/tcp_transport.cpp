// Messages between hosts over one TCP connection to each. Bytes go from the sender's memory to the kernel, and from
// there into the memory of the receive that is posted; a message without one is kept until it is.
//
// A connection that ends is the loss of its host. test() of a receive of records throws it, once, after all that
// came before: links test that receive at every step, which also moves what has arrived.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <system_error>

#include "link/transport.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

// What the kernel may hold unsent: records go before what it does not have yet.
constexpr int kUnsent = 256 << 10;
constexpr std::size_t kAhead = 4096;  // bytes that are read beyond a message: headers, and small messages whole
constexpr std::size_t kTogether = 8;  // messages in one call
// Messages of a tag without a receive: of records more may follow, which are not read yet; the others are of
// chunks, of which fewer are under way.
constexpr std::size_t kMostEarly = 64;
static_assert(kMostEarly > kLinkSlots);

// While packets are lost the kernel repeats them at intervals that double, up to this; 44: TCP_RTO_MAX_MS of
// Linux 6.15, which older headers lack and older kernels refuse.
constexpr int kRtoMax = 44, kRtoMaxMs = 1000;

constexpr const char* kTooLong = "a message is longer than what was expected";

using Kind = TransportError::Kind;

std::string text_of(int error) { return std::generic_category().message(error); }

// A socket that is closed while bytes can be read resets its connection, and the other end loses what it has not read.
void discard_input(int socket) {
  char bytes[kAhead];
  while (recv(socket, bytes, sizeof(bytes), 0) > 0) {
  }
}

// Of all transports of this process. Never destroyed: a link's thread may outlive what is.
std::mutex& all_mutex = *new std::mutex;
std::set<int>& all_sockets = *new std::set<int>;

// Other hosts would take this process for alive as long as a forked child holds its connections.
void close_in_children() {
  static const int registered = pthread_atfork([] { all_mutex.lock(); }, [] { all_mutex.unlock(); },
                                               [] {
                                                 for (const int socket : all_sockets) close(socket);
                                                 all_sockets.clear();
                                                 all_mutex.unlock();
                                               });
  if (registered != 0) throw std::system_error(registered, std::generic_category(), "pthread_atfork");
}

class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(const std::vector<int>& connections) : peers_(connections.size()) {
    for (std::size_t host = 0; host < peers_.size(); ++host) {
      const int socket = peers_[host].socket = connections[host];
      if (socket < 0) continue;
      fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
      const auto set = [&](int name, int value) { setsockopt(socket, IPPROTO_TCP, name, &value, sizeof(value)); };
      set(TCP_NODELAY, 1);
      set(TCP_NOTSENT_LOWAT, kUnsent);
      set(kRtoMax, kRtoMaxMs);
      const std::lock_guard<std::mutex> lock(all_mutex);
      all_sockets.insert(socket);
    }
  }

  ~TcpTransport() override {
    for (Peer& peer : peers_) {
      for (const Message* one : peer.outgoing) delete one;
      for (const auto& receives : peer.receives) {
        for (const Message* one : receives) delete one;
      }
      if (peer.socket < 0) continue;
      const std::lock_guard<std::mutex> lock(all_mutex);
      if (all_sockets.erase(peer.socket) == 0) continue;  // in a child
      shutdown(peer.socket, SHUT_WR);
      discard_input(peer.socket);
      close(peer.socket);
    }
  }

  Transfer send(int host, int tag, const void* data, std::size_t bytes) override {
    Peer& peer = this->peer(host);
    const Header header{static_cast<std::uint64_t>(tag), bytes};
    auto* const message = new Message{header, static_cast<char*>(const_cast<void*>(data)), host, true};
    if (peer.fault.empty()) {
      const auto is_behind = [tag](const Message* other) {
        return tag == kRecords && other->header.tag != kRecords && other->sent == 0;
      };
      peer.outgoing.insert(std::find_if(peer.outgoing.begin(), peer.outgoing.end(), is_behind), message);
      write(peer);
    } else {
      message->is_over = true;
    }
    return reinterpret_cast<Transfer>(message);
  }

  Transfer receive(int host, int tag, void* data, std::size_t bytes) override {
    Peer& peer = this->peer(host);
    const Header header{static_cast<std::uint64_t>(tag), bytes};
    auto* const message = new Message{header, static_cast<char*>(data), host, false};
    peer.receives[header.tag].push_back(message);
    if (!peer.early[header.tag].empty()) take_early(peer, *message);
    return reinterpret_cast<Transfer>(message);
  }

  bool test(Transfer& transfer, std::size_t* received) override {
    auto* const message = reinterpret_cast<Message*>(transfer);
    Peer& peer = this->peer(message->host);
    if (!message->is_over && message->is_send) write(peer);
    if (!message->is_over && !message->is_send && message->header.tag == kRecords) {
      read(peer);
      if (!message->is_over && !peer.fault.empty() && !std::exchange(peer.is_told, true)) {
        throw TransportError(peer.fault, message->host, peer.kind);
      }
    }
    if (!message->is_over) return false;
    if (received != nullptr) *received = message->header.bytes;
    delete message;
    transfer = 0;
    return true;
  }

  // Also gives up what is being sent to that host: a link cancels when it is over.
  void cancel(const Transfer& transfer) override {
    auto* const message = reinterpret_cast<Message*>(transfer);
    if (message->is_over) return;
    Peer& peer = this->peer(message->host);
    end(peer, "this end has closed it");
    peer.is_told = true;
    auto& receives = peer.receives[message->header.tag];
    receives.erase(std::remove(receives.begin(), receives.end(), message), receives.end());
    message->is_over = true;
  }

  void progress() override {
    for (Peer& peer : peers_) {
      if (peer.socket < 0) continue;
      if (!peer.fault.empty()) discard_input(peer.socket);
      write(peer);
      read(peer);
    }
  }

  bool copies() const override { return true; }

  bool has_received(int host) override { return std::exchange(peer(host).has_received, false); }

 private:
  struct Header {
    std::uint64_t tag, bytes;
  };
  // A send or a receive.
  struct Message {
    Header header;  // of a receive: how much there is room for, then how much has come
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
    Kind kind = Kind::kLost;
    bool is_told = false;
    bool has_received = false;
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

  static void write(Peer& peer) {
    while (peer.fault.empty() && !peer.outgoing.empty()) {
      std::array<iovec, 2 * kTogether> parts;
      std::size_t n_parts = 0, wanted = 0;
      for (std::size_t i = 0; i < std::min(peer.outgoing.size(), kTogether); ++i) {
        Message& one = *peer.outgoing[i];
        const std::size_t of_header = std::min(one.sent, sizeof(Header)), of_data = one.sent - of_header;
        parts[n_parts++] = {reinterpret_cast<char*>(&one.header) + of_header, sizeof(Header) - of_header};
        parts[n_parts++] = {one.data + of_data, one.header.bytes - of_data};
        wanted += one.unsent();
      }
      msghdr message{};
      message.msg_iov = parts.data();
      message.msg_iovlen = n_parts;
      const ssize_t written = sendmsg(peer.socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (written < 0) {
        if (errno == EINTR) continue;
        // What the other end had sent before is read first.
        if (errno != EAGAIN && errno != EPIPE && errno != ECONNRESET) end(peer, text_of(errno));
        return;
      }
      for (auto rest = static_cast<std::size_t>(written); rest > 0;) {
        Message& one = *peer.outgoing.front();
        const std::size_t step = std::min(rest, one.unsent());
        one.sent += step;
        rest -= step;
        if (one.unsent() > 0) break;
        one.is_over = true;
        peer.outgoing.pop_front();
      }
      if (static_cast<std::size_t>(written) < wanted) return;
    }
  }

  static void read(Peer& peer) {
    char ahead[kAhead];
    while (peer.fault.empty() && peer.early[kRecords].size() < kMostEarly) {
      const std::size_t wanted = peer.rest + sizeof(ahead);
      const iovec parts[2] = {{peer.at, peer.rest}, {ahead, sizeof(ahead)}};
      const ssize_t found = readv(peer.socket, parts, 2);
      if (found < 0 && errno == EINTR) continue;
      if (found < 0 && errno == EAGAIN) return;
      if (found <= 0) return end(peer, found == 0 ? "the other end has closed it" : text_of(errno));
      peer.has_received = true;
      const auto count = static_cast<std::size_t>(found);
      std::size_t done = std::min(count, peer.rest);
      advance(peer, done);
      const char* next = ahead;
      while (done < count && peer.fault.empty()) {
        const std::size_t step = std::min(count - done, peer.rest);
        std::memcpy(peer.at, next, step);
        next += step;
        done += step;
        advance(peer, step);
      }
      if (count < wanted) return;
    }
  }

  // Bytes have come to `at`.
  static void advance(Peer& peer, std::size_t bytes) {
    peer.at += bytes;
    peer.rest -= bytes;
    if (peer.rest == 0 && !peer.is_in_message) begin(peer);
    if (peer.rest > 0 || !peer.fault.empty()) return;
    auto& receives = peer.receives[peer.header.tag];
    if (!receives.empty()) {
      receives.front()->header.bytes = peer.header.bytes;
      receives.front()->is_over = true;
      receives.pop_front();
    }
    peer.is_in_message = false;
    peer.at = reinterpret_cast<char*>(&peer.header);
    peer.rest = sizeof(Header);
  }

  // A header is complete.
  static void begin(Peer& peer) {
    const auto [tag, bytes] = peer.header;
    if (tag > kResults || bytes > kLongest) return end(peer, "what came is none of our messages", Kind::kForeign);
    const auto& receives = peer.receives[tag];
    if (!receives.empty() && bytes > receives.front()->header.bytes) return end(peer, kTooLong, Kind::kForeign);
    if (tag != kRecords && peer.early[tag].size() >= kMostEarly) {
      return end(peer, "messages of chunks that were not ordered", Kind::kForeign);
    }
    peer.is_in_message = true;
    peer.at = receives.empty() ? peer.early[tag].emplace_back(bytes).data() : receives.front()->data;
    peer.rest = bytes;
  }

  // The first early message is that of this receive. If it is still being read, its rest goes where it belongs.
  static void take_early(Peer& peer, Message& receive) {
    auto& early = peer.early[receive.header.tag];
    const std::vector<char> bytes = std::move(early.front());
    early.pop_front();
    if (bytes.size() > receive.header.bytes) return end(peer, kTooLong, Kind::kForeign);
    const bool is_whole = !early.empty() || !peer.is_in_message || peer.header.tag != receive.header.tag;
    const std::size_t here = bytes.size() - (is_whole ? 0 : peer.rest);
    std::copy_n(bytes.begin(), here, receive.data);
    if (is_whole) {
      receive.header.bytes = bytes.size();
      receive.is_over = true;
      peer.receives[receive.header.tag].pop_front();
    } else {
      peer.at = receive.data + here;
    }
  }

  // Nothing more is received or sent: sends are over, receives when they are cancelled.
  static void end(Peer& peer, const std::string& fault, Kind kind = Kind::kLost) {
    if (peer.fault.empty()) {
      peer.fault = fault;
      peer.kind = kind;
    }
    for (Message* one : peer.outgoing) one->is_over = true;
    peer.outgoing.clear();
  }

  std::vector<Peer> peers_;  // they stay where they are
};

}  // namespace

std::shared_ptr<Transport> tcp_transport(const std::vector<int>& connections) {
  close_in_children();
  return std::make_shared<TcpTransport>(connections);
}

}  // namespace kvstore_hvd
