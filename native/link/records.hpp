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
  kReady,  // to all: all ranks of the host have announced an operation
  kOrder,  // of the conductor, to all: the next entry of the schedule
  kLate,   // to all: which ranks of the host have not announced what others of it have
  kBeat,   // to all: the host is alive; who has left; and whether the world has failed there
};

// Begins every record. `bytes`: of all of it.
struct RecordHeader {
  RecordKind kind;
  std::uint32_t bytes;
};

struct ReadyRecord {
  RecordHeader header;
  TensorId id;
  WeightSums weights;
  Announcement announcement;  // of local rank 0
  std::uint32_t name_bytes;
  std::uint32_t n_told;     // the ranks of the host disagree, or one cannot take part: what each has announced
  std::uint32_t sum_bytes;  // what they have reduced, if the operation is small
  std::uint32_t is_inline;
  // The name, what was told (AnnouncedBy), and the sum follow.
};

// `n_pieces` OrderedPiece follow.
struct OrderRecord {
  RecordHeader header;
  Algorithm algorithm;
  std::int32_t root;
  std::uint32_t n_pieces, staged_bytes;
};
struct OrderedPiece {
  TensorId id;
  std::uint64_t offset, bytes, staged;
};

// `n` numbers in the world follow, 8 bytes each.
struct LateRecord {
  RecordHeader header;
  TensorId id;
  std::uint64_t n;
};

struct BeatRecord {
  RecordHeader header;
  // kOk, or the failure; its text follows. What is complete there will be everywhere, before anybody hears of it:
  // `arrived` entries, and what the READY records make up that had come from each host, whose numbers follow.
  ErrorCode error;
  std::uint32_t text_bytes;
  std::uint64_t arrived;
  std::uint64_t n_left;  // then numbers in the world of ranks that have left follow
};

// Appends to a stream, in which everything is 8 bytes aligned.
class RecordWriter {
 public:
  explicit RecordWriter(std::vector<char>& stream) : stream_(stream), begin_(stream.size()) {}
  // Writes the length into the header that was put first.
  ~RecordWriter() {
    const auto bytes = static_cast<std::uint32_t>(stream_.size() - begin_);
    std::memcpy(stream_.data() + begin_ + offsetof(RecordHeader, bytes), &bytes, sizeof(bytes));
  }
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

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
