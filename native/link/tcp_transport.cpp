#include "link/tcp_transport.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <system_error>
#include <utility>

namespace kvstore_hvd {
namespace {

// What the kernel may hold unsent: records go before what it does not have yet.
constexpr int kUnsent = 256 << 10;
constexpr std::size_t kAhead = 4096;  // bytes that are read beyond a message: headers, and small messages whole
constexpr std::size_t kTogether = 8;  // messages in one call
constexpr std::uint64_t kLongest = std::uint64_t{1} << 32;

// While packets are lost the kernel repeats them at intervals that double, up to this; 44: TCP_RTO_MAX_MS of Linux 6.15,
// which older headers lack and older kernels refuse.
constexpr int kRtoMax = 44, kRtoMaxMs = 1000;

constexpr const char* kTooLong = "a message is longer than what was expected";

std::string text_of(int error) { return std::generic_category().message(error); }

// A socket that is closed while bytes can be read resets its connection, and the other end loses what it has not read.
void discard_input(int socket) {
  char bytes[kAhead];
  while (recv(socket, bytes, sizeof(bytes), 0) > 0) {
  }
}

// Never destroyed: a link's thread may outlive what is.
std::mutex& all_mutex = *new std::mutex;
std::set<int>& all_sockets = *new std::set<int>;

}  // namespace

TcpTransport::TcpTransport(const std::vector<int>& connections) : peers_(connections.size()) {
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

TcpTransport::~TcpTransport() {
  for (Peer& peer : peers_) {
    for (auto* queue : {&peer.records, &peer.bulk}) {
      for (const Outgoing& one : *queue) delete one.operation;
    }
    for (const auto& queue : peer.posted) {
      for (const Operation* one : queue) delete one;
    }
    if (peer.socket < 0) continue;
    shutdown(peer.socket, SHUT_WR);
    discard_input(peer.socket);
    const std::lock_guard<std::mutex> lock(all_mutex);
    all_sockets.erase(peer.socket);
    close(peer.socket);
  }
}

void TcpTransport::close_all() {
  // Without the lock: a thread that the child does not have may have held it.
  for (const int socket : all_sockets) close(socket);
}

Transport::Transfer TcpTransport::send(int host, int tag, const void* data, std::size_t bytes) {
  Peer& peer = this->peer(host);
  auto* const operation = new Operation{host, tag, true, static_cast<char*>(const_cast<void*>(data)), bytes};
  if (!peer.fault.empty()) {
    operation->is_over = true;
  } else {
    (tag == kRecords ? peer.records : peer.bulk).push_back({{static_cast<std::uint64_t>(tag), bytes}, operation});
    write(peer);
  }
  return reinterpret_cast<Transfer>(operation);
}

Transport::Transfer TcpTransport::receive(int host, int tag, void* data, std::size_t bytes) {
  Peer& peer = this->peer(host);
  auto* const operation = new Operation{host, tag, false, static_cast<char*>(data), bytes};
  auto& early = peer.early[static_cast<std::size_t>(tag)];
  if (!early.empty() && early.front().is_complete) {
    hand_over(early.front(), *operation);
    early.pop_front();
  } else {
    peer.posted[static_cast<std::size_t>(tag)].push_back(operation);
  }
  return reinterpret_cast<Transfer>(operation);
}

bool TcpTransport::test(Transfer& transfer) {
  auto* const operation = reinterpret_cast<Operation*>(transfer);
  Peer& peer = this->peer(operation->host);
  if (!operation->is_over && operation->is_send) write(peer);
  if (!operation->is_over && !operation->is_send && operation->tag == kRecords) {
    read(operation->host);
    if (!operation->is_over && !peer.fault.empty() && !std::exchange(peer.is_told, true)) {
      throw TransportError(peer.fault, operation->host, true);
    }
  }
  if (!operation->is_over) return false;
  delete operation;
  transfer = 0;
  return true;
}

void TcpTransport::cancel(const Transfer& transfer) {
  auto* const operation = reinterpret_cast<Operation*>(transfer);
  if (operation->is_over) return;
  Peer& peer = this->peer(operation->host);
  end(peer, "this end has closed it");
  peer.is_told = true;
  auto& posted = peer.posted[static_cast<std::size_t>(operation->tag)];
  posted.erase(std::remove(posted.begin(), posted.end(), operation), posted.end());
  operation->is_over = true;
}

void TcpTransport::progress() {
  for (std::size_t host = 0; host < peers_.size(); ++host) {
    Peer& peer = peers_[host];
    if (peer.socket < 0) continue;
    if (!peer.fault.empty()) discard_input(peer.socket);
    write(peer);
    read(static_cast<int>(host));
  }
}

void TcpTransport::write(Peer& peer) {
  while (peer.fault.empty() && !(peer.records.empty() && peer.bulk.empty())) {
    // The message that has begun, then records, then bulk.
    std::array<iovec, 2 * kTogether> parts;
    std::array<Outgoing*, kTogether> messages;
    std::size_t n_messages = 0, n_parts = 0, wanted = 0;
    const bool has_begun = !peer.bulk.empty() && peer.bulk.front().done > 0;
    const auto add = [&](Outgoing& one) {
      if (n_messages == kTogether) return;
      messages[n_messages++] = &one;
      const std::size_t of_header = std::min(one.done, sizeof(Header)), of_data = one.done - of_header;
      parts[n_parts++] = {reinterpret_cast<char*>(&one.header) + of_header, sizeof(Header) - of_header};
      parts[n_parts++] = {one.operation->data + of_data, one.operation->bytes - of_data};
      wanted += sizeof(Header) + one.operation->bytes - one.done;
    };
    if (has_begun) add(peer.bulk.front());
    for (Outgoing& one : peer.records) add(one);
    for (std::size_t i = has_begun ? 1 : 0; i < peer.bulk.size(); ++i) add(peer.bulk[i]);
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
    auto rest = static_cast<std::size_t>(written);
    for (std::size_t i = 0; i < n_messages && rest > 0; ++i) {
      Outgoing& one = *messages[i];
      const std::size_t step = std::min(rest, sizeof(Header) + one.operation->bytes - one.done);
      one.done += step;
      rest -= step;
      if (one.done < sizeof(Header) + one.operation->bytes) break;
      one.operation->is_over = true;
      auto& queue = one.operation->tag == kRecords ? peer.records : peer.bulk;
      queue.pop_front();
    }
    if (static_cast<std::size_t>(written) < wanted) return;
  }
}

void TcpTransport::read(int host) {
  Peer& peer = this->peer(host);
  char ahead[kAhead];
  while (peer.fault.empty()) {
    const std::size_t rest = peer.rest;
    iovec parts[2] = {{peer.at, rest}, {ahead, sizeof(ahead)}};
    const ssize_t found = rest > 0 ? readv(peer.socket, parts, 2) : recv(peer.socket, ahead, sizeof(ahead), 0);
    if (found < 0 && errno == EINTR) continue;
    if (found < 0 && errno == EAGAIN) return;
    if (found <= 0) return end(peer, found == 0 ? "the other end has closed it" : text_of(errno));
    has_received_ = true;
    const auto count = static_cast<std::size_t>(found);
    const std::size_t direct = std::min(count, rest);
    peer.at += direct;
    peer.rest -= direct;
    if (rest > 0 && peer.rest == 0) finish(peer);
    take(peer, ahead, count - direct);
    if (count < rest + sizeof(ahead)) return;
  }
}

// Bytes that were read beyond the end of a message.
void TcpTransport::take(Peer& peer, const char* bytes, std::size_t count) {
  while (count > 0 && peer.fault.empty()) {
    const bool is_header = peer.rest == 0;
    char* const to = is_header ? reinterpret_cast<char*>(&peer.header) + peer.header_bytes : peer.at;
    const std::size_t step = std::min(count, is_header ? sizeof(Header) - peer.header_bytes : peer.rest);
    std::memcpy(to, bytes, step);
    bytes += step;
    count -= step;
    if (is_header) {
      peer.header_bytes += step;
      if (peer.header_bytes == sizeof(Header)) begin(peer);
    } else {
      peer.at += step;
      peer.rest -= step;
      if (peer.rest == 0) finish(peer);
    }
  }
}

// A header is complete.
void TcpTransport::begin(Peer& peer) {
  peer.header_bytes = 0;
  if (peer.header.tag >= kTags || peer.header.bytes > kLongest) return end(peer, "what came is none of our messages");
  auto& posted = peer.posted[peer.header.tag];
  peer.rest = peer.header.bytes;
  if (posted.empty()) {
    auto& early = peer.early[peer.header.tag];
    early.emplace_back().bytes.resize(peer.rest);
    peer.into = nullptr;
    peer.at = early.back().bytes.data();
  } else {
    peer.into = posted.front();
    peer.at = peer.into->data;
    if (peer.rest > peer.into->bytes) return end(peer, kTooLong);
  }
  if (peer.rest == 0) finish(peer);
}

// So is a message.
void TcpTransport::finish(Peer& peer) {
  auto& posted = peer.posted[peer.header.tag];
  if (peer.into != nullptr) {
    peer.into->is_over = true;
    peer.into = nullptr;
    posted.pop_front();
    return;
  }
  auto& early = peer.early[peer.header.tag];
  early.back().is_complete = true;
  if (posted.empty()) return;
  hand_over(early.front(), *posted.front());
  early.pop_front();
  posted.pop_front();
}

void TcpTransport::hand_over(Early& early, Operation& operation) {
  if (early.bytes.size() > operation.bytes) return end(peer(operation.host), kTooLong);
  std::copy(early.bytes.begin(), early.bytes.end(), operation.data);
  operation.is_over = true;
}

// Nothing more is received or sent: sends are over, receives when they are cancelled.
void TcpTransport::end(Peer& peer, const std::string& fault) {
  if (peer.fault.empty()) peer.fault = fault;
  for (auto* queue : {&peer.records, &peer.bulk}) {
    for (const Outgoing& one : *queue) one.operation->is_over = true;
    queue->clear();
  }
}

}  // namespace kvstore_hvd
