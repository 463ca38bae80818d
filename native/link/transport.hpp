// Messages between the links of a world's hosts: MPI's point-to-point semantics. Messages of one sender, receiver and
// tag arrive in the order in which they were sent, and a message without a receive waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvstore_hvd {

struct TransportError : std::runtime_error {
  enum class Kind {
    kFailed,
    kLost,     // the connection has ended: nothing more will come
    kForeign,  // bytes that no host of this version sends
  };
  explicit TransportError(const std::string& what, int its_host = -1, Kind its_kind = Kind::kFailed)
      : std::runtime_error(what), host(its_host), kind(its_kind) {}
  int host;  // the other one, if it is known
  Kind kind;
};

// What a message is: one tag each.
enum Tag : int { kRecords, kPartials, kResults };
inline constexpr int kTags = 4;  // of one world
// Bytes of a message, and of a record: the link's memory of a chunk, see Layout::link_bytes.
inline constexpr std::size_t kLongest = std::size_t{4} << 20;

// One thread. Members throw TransportError.
class Transport {
 public:
  virtual ~Transport() = default;

  // A message under way; the memory stays untouched, and is kept, until it is over.
  using Transfer = std::uintptr_t;
  virtual Transfer send(int host, int tag, const void* data, std::size_t bytes) = 0;
  // Of up to `bytes`.
  virtual Transfer receive(int host, int tag, void* data, std::size_t bytes) = 0;
  // Whether it is over; the handle is 0 then. `received`: the bytes of the message, of a receive that is over.
  virtual bool test(Transfer& transfer, std::size_t* received = nullptr) = 0;
  // Gives a receive up; it is over when test() says so.
  virtual void cancel(const Transfer& transfer) = 0;
  // Makes progress. MPI: a message whose send is over may need more calls of its sender.
  virtual void progress() = 0;
  // Whether the system has copied what a receiver has: then a result may be received where its parts were sent from.
  virtual bool copies() const { return false; }
  // True when bytes of that host have arrived since the last call, even if they complete no message.
  virtual bool has_received(int /*host*/) { return false; }
};

// Addresses of MPI's functions, and its datatype of bytes.
struct MpiFunctions {
  std::uintptr_t isend, irecv, test, cancel, iprobe, get_count;
  std::uintptr_t byte;
};
// `ranks`: by host, that of its link in the communicator. Messages have kTags tags, from `first_tag` on.
std::shared_ptr<Transport> mpi_transport(const MpiFunctions& functions, std::uintptr_t communicator,
                                         std::vector<int> ranks, int first_tag);

// `connections`: sockets by host, -1 for this one; they are owned, and closed in forked children.
std::shared_ptr<Transport> tcp_transport(const std::vector<int>& connections);

}  // namespace kvstore_hvd
