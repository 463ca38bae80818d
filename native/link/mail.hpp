// The records that one link exchanges with another, and the mail that carries them: a stream of bytes each way, of
// which one message each way is under way at a time. What is written meanwhile goes together with the next.
//
// Hosts of one world run the same build on machines of one byte order, so values are in the stream as they are in
// memory. Both ends draw a random number and learn the other's before anything of the stream is sent: messages of an
// earlier attempt of the other end, or to an earlier one of this end, are dropped.
#pragma once

#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "link/transport.hpp"

namespace kvstore_hvd {

// The name of a tensor between hosts: a hash of 128 bits. With a million names the chance of a collision is 1e-27.
struct TensorId {
  std::uint64_t high, low;
  bool operator==(const TensorId& other) const { return high == other.high && low == other.low; }
};
struct TensorIdHash {
  std::size_t operator()(const TensorId& id) const { return id.low; }
};

// FNV-1a, 128 bits (Fowler, Noll, Vo).
inline TensorId id_of(std::string_view name) {
  __extension__ using Wide = unsigned __int128;
  constexpr Wide kPrime = (Wide{1} << 88) + 0x13b;
  Wide hash = (Wide{0x6c62272e07bb0142} << 64) + 0x62b821756295c58d;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * kPrime;
  return {static_cast<std::uint64_t>(hash >> 64), static_cast<std::uint64_t>(hash)};
}

enum class RecordKind : std::uint32_t {
  kReady,  // to all: all ranks of the host have announced an operation
  kOrder,  // of the conductor, to all: the next entry of the schedule
  kBeat,   // to all: the host is alive; ranks that have left or are late, and the failure of the world
};

// Bytes that no host of this version sends.
struct ForeignRecord : std::exception {
  const char* what() const noexcept override { return "a record that none of its version sends"; }
};
inline void expect(bool fact) {
  if (!fact) throw ForeignRecord();
}

// Begins every record. `bytes`: of all of it.
struct RecordHeader {
  RecordKind kind;
  std::uint32_t bytes;
};

// Appends a value, or a string or vector of values behind their number.
template <class T>
void append(std::vector<char>& stream, const T& value) {
  const auto append_bytes = [&](const void* data, std::size_t bytes) {
    const auto* const begin = static_cast<const char*>(data);
    stream.insert(stream.end(), begin, begin + bytes);
  };
  if constexpr (std::is_trivially_copyable_v<T>) {
    append_bytes(&value, sizeof(value));
  } else {
    append(stream, value.size());
    append_bytes(value.data(), value.size() * sizeof(value[0]));
  }
}

template <class... T>
void append_record(std::vector<char>& stream, RecordKind kind, const T&... values) {
  const std::size_t begin = stream.size();
  append(stream, RecordHeader{kind, 0});
  (append(stream, values), ...);
  const auto bytes = static_cast<std::uint32_t>(stream.size() - begin);
  std::memcpy(stream.data() + begin + offsetof(RecordHeader, bytes), &bytes, sizeof(bytes));
}

// Reads the values of a record. Throws ForeignRecord.
class RecordReader {
 public:
  RecordReader(const char* begin, const char* end) : at_(begin), end_(end) {}

  // All of them, in the same order.
  template <class... T>
  void get(T&... values) {
    (get_one(values), ...);
    expect(at_ == end_);
  }

 private:
  template <class T>
  void get_one(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      std::uint8_t byte = 0;
      get_one(byte);
      expect(byte <= 1);
      value = byte == 1;
    } else if constexpr (std::is_trivially_copyable_v<T>) {
      get_bytes(&value, sizeof(value));
    } else {
      std::size_t count = 0;
      get_one(count);
      expect(count <= rest() / sizeof(value[0]));
      value.resize(count);
      get_bytes(value.data(), count * sizeof(value[0]));
    }
  }
  void get_bytes(void* data, std::size_t bytes) {
    expect(bytes <= rest());
    if (bytes > 0) std::memcpy(data, at_, bytes);
    at_ += bytes;
  }
  std::size_t rest() const { return static_cast<std::size_t>(end_ - at_); }

  const char *at_, *end_;
};

class Mail {
 public:
  // `build`: a hash of the version and settings that must be equal on all hosts.
  Mail(Transport& transport, int host, std::uint64_t build);

  // From kMet on both ends have met.
  enum class State { kUnknown, kOtherBuild, kMet, kStartedOver };
  // From any thread. Relaxed: nothing else depends on it. A thread that has seen a failure of the other end sees kMet:
  // setting a failure is a release.
  State state() const { return state_.load(std::memory_order_relaxed); }

  // Sends what has been appended to outgoing(), once both ends have met, and receives, without waiting; calls `handle`
  // with each record that is complete. Returns whether anything has moved. Throws ForeignRecord.
  using Handle = std::function<void(RecordKind, RecordReader)>;
  bool progress(const Handle& handle);
  std::vector<char>& outgoing() { return stream_; }
  // Whether nothing waits to be sent, or the other end is not there.
  bool has_sent_all() const { return state() != State::kMet || !(has_outgoing() || sending_ != 0); }
  // Sends this end's number again, unless both ends have met.
  void greet() { greets_ = greets_ || state() == State::kUnknown; }

  // Whether a message has come since the last call.
  bool has_received() { return std::exchange(has_received_, false); }
  // Drops what comes from now on.
  void ignore() { is_ignored_ = true; }

  // Receives and sends nothing more. Returns whether nothing is under way: else to be called again.
  bool close();

 private:
  // Begins each message; the rest is of the stream.
  struct Head {
    std::uint64_t build, from, to, bytes;  // `to`: 0 before the sender knows the number
  };
  static constexpr std::size_t kMessage = std::size_t{68} << 10;

  bool has_outgoing() const { return stream_.size() > sizeof(Head); }
  bool send();
  bool receive(const Handle& handle);
  void read(std::size_t bytes, const Handle& handle);
  bool is_for_us(const Head& head);

  Transport& transport_;
  const int host_;
  const std::uint64_t build_, own_;
  std::uint64_t other_ = 0;
  std::atomic<State> state_{State::kUnknown};
  bool greets_ = true;
  std::vector<char> stream_ = std::vector<char>(sizeof(Head));  // the rest of the stream, behind the place of a head
  std::vector<char> partial_record_;                            // a record whose end has not come
  std::vector<char> in_flight_, receive_buffer_ = std::vector<char>(kMessage),
                                parsing_ = receive_buffer_;  // a message each
  Transport::Transfer sending_ = 0, receiving_ = 0;
  bool has_received_ = false, is_ignored_ = false, is_closed_ = false;
};

}  // namespace kvstore_hvd
