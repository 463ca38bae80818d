// What links tell each other: records in a stream of bytes from each host to each other. Hosts of one world run the
// same build on machines of one byte order, so the records are these structures, 8 bytes aligned, as they lie in
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/status.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

// The name of a tensor between hosts, whose tables have it in different slots: a hash of 128 bits. With a million names
// the chance that two are taken for one is 1e-27.
struct TensorId {
  std::uint64_t high, low;
  bool operator==(const TensorId& other) const { return high == other.high && low == other.low; }
};
struct TensorIdHash {
  std::size_t operator()(const TensorId& id) const { return id.low; }
};
TensorId id_of(std::string_view name);

enum class RecordKind : std::uint32_t {
  kReady,   // all ranks of the host have announced an operation
  kInline,  // the same, to everybody, with what they have reduced
  kOrder,   // the conductor: the next entry of the schedule
  kAsk,     // the conductor: what have your ranks announced?
  kTell,
  kLeft,     // the conductor, to a host that waits: for an operation that another one left without
  kHello,    // who the ranks of the host are
  kEager,    // ranks of the host ask what they have missed: everybody says at once what it waits for
  kWaiting,  // to the conductor: all ranks of the host wait for an operation
  kWanted,   // the conductor, to a host that has not announced it
  kLate,     // such a host: which of its ranks have not
  kAbort,    // the world has failed
  kBye,      // all ranks of the host have left
};

// Begins every record. `bytes`: of all of it.
struct RecordHeader {
  RecordKind kind;
  std::uint32_t bytes;
};

// See World::weights().
struct WeightSums {
  double sum;
  std::uint32_t present, absent;
};

struct ReadyRecord {
  RecordHeader header;
  TensorId id;
  std::uint64_t digest;
  WeightSums weights;
  std::int32_t priority;
  std::uint32_t disagrees;  // the ranks of the host among themselves, or one could not take part
  // kInline: what they have reduced follows.
};

struct OrderRecord {
  RecordHeader header;
  Algorithm algorithm;
  std::int32_t root;
  std::uint32_t n_pieces, staged_bytes;
  // kFail: why; the text follows the one piece, and then, for each host, whether it had sent its announcement inline.
  ErrorCode error;
  std::uint32_t text_bytes;
};
struct OrderedPiece {
  TensorId id;
  std::uint64_t offset, bytes;
  double weights;
  std::uint64_t staged;
};

struct AskRecord {
  RecordHeader header;
  TensorId id;
};
// What the ranks of a host have announced follows: `n` AnnouncedBy.
struct TellRecord {
  RecordHeader header;
  TensorId id;
  std::uint64_t n;
};

struct LeftRecord {
  RecordHeader header;
  TensorId id;
  std::int64_t host;
};

// `n` Introduction follow.
struct HelloRecord {
  RecordHeader header;
  std::uint64_t n;
};
struct Introduction {
  std::int32_t rank_of_world, pid;
  char host[64];
};

// kWaiting, kWanted. The name follows.
struct WantedRecord {
  RecordHeader header;
  TensorId id;
  Announcement announcement;  // of one rank that waits
  std::int32_t host;          // that waits
  std::uint32_t is_inline;    // it has told everybody
  std::uint64_t name_bytes;
};

// To everybody. `n` numbers in the world follow, 8 bytes each.
struct LateRecord {
  RecordHeader header;
  TensorId id;
  std::uint64_t n;
};

// The text follows, and then, for each host, how many inline announcements of it have come to the host that tells it.
// What is complete there will be everywhere, before anybody hears of the failure: `arrived` entries, and what those
// announcements make up.
struct AbortRecord {
  RecordHeader header;
  ErrorCode error;
  std::uint32_t text_bytes;
  std::uint64_t arrived;
};

// Appends to a stream, in which everything is 8 bytes aligned.
class RecordWriter {
 public:
  explicit RecordWriter(std::vector<char>& stream) : stream_(stream), begin_(stream.size()) {}

  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
    put(&value, sizeof(value));
  }
  void put(const void* data, std::size_t bytes) {
    const std::size_t end = stream_.size();
    stream_.resize(end + (bytes + 7) / 8 * 8);
    if (bytes > 0) std::memcpy(stream_.data() + end, data, bytes);
  }
  // Writes the length into the header that was put first.
  void end() {
    const auto bytes = static_cast<std::uint32_t>(stream_.size() - begin_);
    std::memcpy(stream_.data() + begin_ + offsetof(RecordHeader, bytes), &bytes, sizeof(bytes));
  }

 private:
  std::vector<char>& stream_;
  const std::size_t begin_;
};

// Reads one record, in the same order.
class RecordReader {
 public:
  explicit RecordReader(const char* record) : at_(record) {}

  template <class T>
  T get() {
    T value;
    std::memcpy(&value, get(sizeof(value)), sizeof(value));
    return value;
  }
  const char* get(std::size_t bytes) {
    const char* const found = at_;
    at_ += (bytes + 7) / 8 * 8;
    return found;
  }
  std::string text(std::size_t bytes) { return std::string(get(bytes), bytes); }

 private:
  const char* at_;
};

}  // namespace kvstore_hvd
