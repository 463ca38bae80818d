// Arrays in arenas, which every rank can read and write: whoever claims a part reduces it, from all arrays into all.
#include "engine/algorithms/algorithm.hpp"

namespace kvstore_hvd {
namespace {

Claims& claims_of(const Chunk& chunk) { return chunk.world().claims[chunk.index() % kEntries]; }

void reduce_part(Chunk& chunk, Range part) {
  World& world = chunk.world();
  chunk.for_each_in(part, [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    const auto array = [&](int r) { return world.arena(r) + world.mark(piece.slot, r).place + piece.offset + offset; };
    chunk.reduce_to_all(piece, array, array, bytes);
  });
}

// No waiting: that an entry is scheduled says that all arrays are ready. Once the world is lost, the others' may be in
// use again.
bool reduce_claimed(Chunk& chunk) {
  if (chunk.is_lost) return true;
  const Entry& entry = chunk.entry();
  Claims& claims = claims_of(chunk);
  const std::uint32_t parts = (entry.staged_bytes + entry.part_bytes - 1) / entry.part_bytes;
  for (;;) {
    // Relaxed: the arrays became visible with the entry.
    const std::uint32_t part = claims.next.fetch_add(1, std::memory_order_relaxed);
    if (part >= parts) return true;
    const std::uint64_t begin = std::uint64_t{part} * entry.part_bytes;
    reduce_part(chunk, Range{begin, std::min<std::uint64_t>(begin + entry.part_bytes, entry.staged_bytes)});
    // Release and acquire: whoever does the last part publishes what all have written.
    if (claims.done.fetch_add(1, std::memory_order_acq_rel) + 1 == parts) {
      claims.finished.post(static_cast<std::uint32_t>(chunk.index() + 1));
    }
  }
}

// The parts that others have claimed.
bool await_all_parts(Chunk& chunk) { return chunk.wait(claims_of(chunk).finished, chunk.index() + 1); }

}  // namespace

const Steps kDirect{Steps::Memory::kArrays, nullptr, reduce_claimed, await_all_parts};

}  // namespace kvstore_hvd
