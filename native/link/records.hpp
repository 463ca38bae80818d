// What links tell each other: records in a stream of bytes from each host to each other. Hosts of one world run the
// same build on machines of one byte order, so values are in the stream as they are in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string_view>
#include <type_traits>
#include <vector>

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
  kBeat,   // to all: the host is alive; who has left, who is late, and whether the world has failed there
};

// What came is no record that a host of this version sends.
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

}  // namespace kvstore_hvd
