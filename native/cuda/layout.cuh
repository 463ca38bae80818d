// What the host gives to the kernels, and the memory in which ranks meet. kvstore_hvd/gpu/kernels.py has the same
// structures and describes their fields.
#pragma once

#include "platform.cuh"

namespace kvstore_hvd::gpu {

constexpr u32 kMaxRanks = 16;
constexpr u32 kMaxChannels = 64;
constexpr u32 kSlots = 4;  // a power of two: the counters of the slots wrap around
constexpr u32 kVectorBytes = sizeof(Vector);
// Shares of an array are cut at these: a cache line has one writer.
constexpr u32 kLineVectors = 128 / kVectorBytes;

// types.hpp of the CPU engine has the same values.
enum Op : u32 { kSum = 0, kAverage = 1, kMin = 2, kMax = 3, kProduct = 4 };

struct Segment {
  u8* pointer;
  u64 offset;
  u64 count;
  u32 first_tile;
  u32 rank;
};

// A counter in a line of its own: its one writer disturbs nobody who reads another.
struct alignas(128) Counter {
  u32 value;
};

// Of one rank, in device memory that all ranks see. All counters start equal on all ranks (0, say), and wrap around:
// they are compared by their signed distance. Nobody else touches what no comment says is written by others.
struct Control {
  Counter filled[kMaxChannels];  // slots of this rank's FIFO that the previous rank of the ring has filled
  Counter freed[kMaxChannels];   // slots of the next rank's FIFO that the next rank has read
  Counter steps[kMaxChannels];   // slots that this rank has filled, and as many it has read, in all launches so far
  Counter met[kMaxRanks];        // [q]: the last meeting at which rank q, which writes it, has arrived
  Counter arrived;               // blocks of this rank that have arrived at the meeting under way
  Counter launches;              // of kernels that meet
  Counter stop;                  // not 0: leave (see waiting.cuh); any rank writes it
  Counter unused;
};

struct World {
  u32 rank;
  u32 ranks;
  u32 slot_vectors;
  u32 padding;
  u8* staging[kMaxRanks];
  u8* fifo[kMaxRanks];
  Control* control[kMaxRanks];
  const u32* abort;
  u32* status;
};

struct Launch {
  const Segment* inputs;
  const Segment* outputs;
  u64 bytes;
  u64 staging_offset;
  u64 timeout_ns;
  double prescale;
  double postscale;
  float prescale32;
  float postscale32;
  u32 n_inputs;
  u32 n_outputs;
  u32 op;
  u32 meet;
};

struct Copy {
  const Segment* segments;
  u8* buffer;
  double scale;
  float scale32;
  u32 n_segments;
  u32 into_buffer;
  u32 padding;
};

KVHVD_INLINE constexpr u64 smaller(u64 a, u64 b) { return a < b ? a : b; }
KVHVD_INLINE constexpr u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
template <class Count>
KVHVD_INLINE Count divided_up(Count a, Count b) {
  return (a + b - 1) / b;
}

// Where the k-th of n shares of `vectors` vectors begins; the (n + 1)-th begins at the end.
template <class Count>
KVHVD_INLINE Count share_begin(Count vectors, u32 n, u32 k) {
  const Count share = divided_up(divided_up(vectors, Count{n}), Count{kLineVectors}) * kLineVectors;
  return smaller(share * k, vectors);
}

}  // namespace kvstore_hvd::gpu
