// Memory of any alignment: parts of vectors, and copies by a block.
#pragma once

#include "layout.cuh"

namespace kvstore_hvd::gpu {

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

}  // namespace kvstore_hvd::gpu
