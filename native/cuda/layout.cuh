// What the host gives to the kernels, the memory in which ranks meet, access to memory, and waiting.
// kvstore_hvd/gpu/kernels.py has the same structures and describes their fields.
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

// A counter in a line of its own: its one writer does not disturb readers of others.
struct alignas(128) Counter {
  u32 value;
};

// Of one rank, in device memory that all ranks see. All counters start equal on all ranks (0, say), and wrap around:
// they are compared by their signed distance. Only its rank writes a counter, unless a comment says otherwise.
struct Control {
  Counter filled[kMaxChannels];  // slots of this rank's FIFO that the previous rank of the ring has filled
  Counter freed[kMaxChannels];   // slots of the next rank's FIFO that the next rank has read
  Counter steps[kMaxChannels];   // slots that this rank has filled, and as many it has read, in all launches so far
  Counter met[kMaxRanks];        // [q]: the last meeting at which rank q, which writes it, has arrived
  Counter arrived;               // blocks of this rank that have arrived at the meeting under way
  Counter launches;              // of kernels that meet
  Counter stop;                  // not 0: leave (see stop_all()); any rank writes it
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

// ---- Memory of any alignment: parts of vectors, and copies by a block ----

KVHVD_INLINE u32 low_bits(const void* address) { return static_cast<u32>(reinterpret_cast<u64>(address)); }

// The first `bytes` (1 to 16) bytes of a vector at any address; no other byte is touched. Words are unrolled: an index
// into a vector that is not known to the compiler would put the vector into memory. Bytes are rare, and loops.
KVHVD_INLINE Vector load_part(const u8* from, u32 bytes) {
  Vector vector = {};
  if (((low_bits(from) | bytes) & 3U) == 0) {
    KVHVD_UNROLL
    for (u32 i = 0; i < 4; ++i) {
      if (4 * i < bytes) vector.words[i] = load<u32>(from + 4 * i);
    }
    return vector;
  }
  KVHVD_UNROLL
  for (u32 half = 0; half < 2; ++half) {
    u64 word = 0;
    KVHVD_ROLLED
    for (u32 i = 0; i < 8 && 8 * half + i < bytes; ++i) {
      word |= static_cast<u64>(load<u8>(from + 8 * half + i)) << (8 * i);
    }
    vector.words[2 * half] = static_cast<u32>(word);
    vector.words[2 * half + 1] = static_cast<u32>(word >> 32);
  }
  return vector;
}
KVHVD_INLINE void store_part(u8* to, const Vector& vector, u32 bytes) {
  if (((low_bits(to) | bytes) & 3U) == 0) {
    KVHVD_UNROLL
    for (u32 i = 0; i < 4; ++i) {
      if (4 * i < bytes) store(to + 4 * i, vector.words[i]);
    }
    return;
  }
  KVHVD_UNROLL
  for (u32 half = 0; half < 2; ++half) {
    u64 rest = vector.words[2 * half] | static_cast<u64>(vector.words[2 * half + 1]) << 32;
    KVHVD_ROLLED
    for (u32 i = 0; i < 8 && 8 * half + i < bytes; ++i) {
      store(to + 8 * half + i, static_cast<u8>(rest));
      rest >>= 8;
    }
  }
}

// The threads of the block copy `bytes` bytes, a multiple of the size of a Unit, to which both addresses are aligned.
template <class Unit>
KVHVD_INLINE void copy_units(u8* to, const u8* from, u32 bytes) {
  constexpr u32 kAtOnce = sizeof(Unit) == sizeof(Vector) ? 4 : 1;  // the others are for the few that are misaligned
  constexpr u32 kSize = sizeof(Unit);
  const u32 step = threads() * kSize;
  u32 at = thread() * kSize;
  if constexpr (kAtOnce > 1) {
    for (; at + (kAtOnce - 1) * step < bytes; at += kAtOnce * step) {
      Unit units[kAtOnce];
      KVHVD_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) units[k] = load<Unit>(from + at + k * step);
      KVHVD_UNROLL
      for (u32 k = 0; k < kAtOnce; ++k) store(to + at + k * step, units[k]);
    }
  }
  for (; at < bytes; at += step) store(to + at, load<Unit>(from + at));
}

// The threads of the block copy `bytes` bytes between any two addresses: by vectors with a head and a tail of bytes
// where both are misaligned alike.
KVHVD_INLINE void copy_bytes(u8* to, const u8* from, u32 bytes) {
  const u32 difference = low_bits(to) ^ low_bits(from);
  if ((difference & (kVectorBytes - 1)) == 0) {
    const u32 head = smaller(bytes, (kVectorBytes - low_bits(to)) & (kVectorBytes - 1));
    const u32 whole = (bytes - head) / kVectorBytes * kVectorBytes;
    copy_units<u8>(to, from, head);
    copy_units<Vector>(to + head, from + head, whole);
    copy_units<u8>(to + head + whole, from + head + whole, bytes - head - whole);
  } else if (((low_bits(to) | low_bits(from) | bytes) & 3U) == 0) {
    copy_units<u32>(to, from, bytes);
  } else {
    copy_units<u8>(to, from, bytes);
  }
}

// Calls body(segment, first, count) for the tiles of a table that fall to this block, all its threads together. Every
// block has about as many tiles, one after another.
template <class Body>
KVHVD_INLINE void for_tiles(const Segment* table, u32 n, u32 tile_size, const Body& body) {
  if (n == 0) return;
  const u64 tiles = table[n - 1].first_tile + divided_up(table[n - 1].count, u64{tile_size});
  u32 tile = static_cast<u32>(tiles * block() / blocks());
  const u32 end = static_cast<u32>(tiles * (block() + 1) / blocks());
  if (tile == end) return;
  // The last segment that does not begin after the tile: empty ones begin where the next one does.
  u32 at = 0;
  for (u32 after = n; after - at > 1;) {
    const u32 middle = at + (after - at) / 2;
    if (table[middle].first_tile <= tile) {
      at = middle;
    } else {
      after = middle;
    }
  }
  for (; tile < end; ++tile) {
    while (at + 1 < n && table[at + 1].first_tile <= tile) ++at;
    const Segment segment = table[at];
    const u64 first = u64{tile - segment.first_tile} * tile_size;
    body(segment, first, static_cast<u32>(smaller(segment.count - first, u64{tile_size})));
  }
}

// ---- Waiting for other ranks: always bounded, and never silently ----

enum Cause : u32 { kTimeout = 1, kAborted = 2 };
enum Place : u32 { kStart = 1, kEnd = 2, kFilledSlot = 3, kFreeSlot = 4 };

// What the threads of a block tell each other, in shared memory.
struct Shared {
  u32 go;        // 0: leave
  u32 last;      // of the blocks to arrive at a meeting
  u32 launches;  // before this one
  // Of a ring. Here, because registers are scarce there.
  const u8* input;
  u8* output;
  u64 begin;  // of the block's part, in vectors
  u64 end;
};

// Makes every block of every rank leave at its next wait. The first word of a rank stays, and becomes its status.
// Relaxed: the word publishes nothing but itself.
KVHVD_INLINE void stop_all(const World& world, Cause cause, u32 awaited, Place place) {
  const u32 word = cause | world.rank << 8 | awaited << 16 | static_cast<u32>(place) << 24;
  const u32 before = compare_and_swap_relaxed(&world.control[world.rank]->stop.value, 0, word);
  if (before != 0) {
    // Somebody else was first, perhaps a moment ago: still the host must not take this launch for a good one.
    store_relaxed(world.status, before);
    return;
  }
  store_relaxed(world.status, word);
  for (u32 rank = 0; rank < world.ranks; ++rank) {
    if (rank != world.rank) store_relaxed(&world.control[rank]->stop.value, word);
  }
}

// Called by one thread. Returns true once `counter`, which rank `awaited` writes, has reached `wanted`: what that rank
// did before it stored the value is then before what this thread does. Returns false when a rank stops, or at the
// limit.
KVHVD_INLINE bool wait_for(const World& world, const Launch& launch, const Counter& counter, u32 wanted, u32 awaited,
                           Place place) {
  u64 began = 0;
  // The signed distance: counters wrap around.
  for (u32 look = 1; static_cast<i32>(load_acquire(&counter.value) - wanted) < 0; ++look) {
    if (look % kLooks != 0) continue;
    pause();
    const u32 word = load_relaxed(&world.control[world.rank]->stop.value);
    if (word != 0) {
      store_relaxed(world.status, word);
      return false;
    }
    if (load_relaxed(world.abort) != 0) {
      stop_all(world, kAborted, awaited, place);
      return false;
    }
    const u64 now = now_ns();
    if (began == 0) {
      began = now;
    } else if (now - began > launch.timeout_ns) {
      stop_all(world, kTimeout, awaited, place);
      return false;
    }
  }
  return true;
}

// Meeting of all blocks of all ranks; called by all threads. Returns true once every block of every rank has called it
// with this number: what they did before is then before what this block does. Numbers grow by at least 1 from meeting
// to meeting. Returns false when the block is to leave.
KVHVD_INLINE bool meet(const World& world, const Launch& launch, u32 number, Place place, Shared& shared) {
  Control& own = *world.control[world.rank];
  block_sync();  // the block's accesses are before what thread 0 does
  if (thread() == 0) {
    shared.go = 1;
    shared.last = 1;
    // Release: this block's accesses are before the flags that the last block to arrive stores; acquire: so are those
    // of the blocks that arrived before it.
    if (blocks() > 1 && add_acquire_release(&own.arrived.value, 1) + 1 != blocks()) shared.last = 0;
    // No block adds again before it has seen the flag that this block is about to store.
    if (shared.last != 0) store_relaxed(&own.arrived.value, 0);
  }
  block_sync();
  // All flags before the first wait: a rank that waits for this one must not wait for another one through it.
  // Release: all accesses of this rank, gathered above, are before the flag.
  for (u32 rank = thread(); shared.last != 0 && rank < world.ranks; rank += threads()) {
    store_release(&world.control[rank]->met[world.rank].value, number);
  }
  for (u32 rank = thread(); rank < world.ranks; rank += threads()) {
    if (!wait_for(world, launch, own.met[rank], number, rank, place)) store_shared(&shared.go, 0);
  }
  block_sync();  // what the ranks did before their flags is before what any thread does now
  return shared.go != 0;
}

}  // namespace kvstore_hvd::gpu
