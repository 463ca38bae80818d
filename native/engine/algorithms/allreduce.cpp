// Allreduces on one host.
//
// One-shot: every rank stages its contribution, and reduces those of all into its own result.
//
// Two-shot: every rank reduces one slice for all: it reads the others' contributions to it from their staging memories,
// writes the result back there, and copies the other slices from its own. Each staging line moves between two cores
// exactly twice and is never shared for reading: rewriting a line that other cores hold copies of costs more.
//
// Direct: arrays in arenas, which every rank can read and write. A rank claims a part of the entry, reduces it from all
// arrays into all, and claims the next; so a rank that comes late does less.
#include <cstring>

#include "engine/algorithms/algorithm.hpp"

namespace kvstore_hvd {
namespace {

void fill_all(Chunk& chunk) { chunk.stage(chunk.all()); }

bool reduce_all(Chunk& chunk) {
  if (!chunk.all_filled()) return false;
  chunk.for_each_in(chunk.all(), [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    const auto input = [&](int r) {
      return (r == chunk.rank() ? chunk.source(piece) : chunk.staging(r) + piece.staged) + offset;
    };
    const auto own = [&](int) { return chunk.result(piece) + offset; };
    chunk.reduce(chunk.reduction(piece), input, own, 1, bytes);
  });
  return true;
}

// This rank's own slice is reduced from where it lies.
void fill_others(Chunk& chunk) {
  const Range own = chunk.own_slice();
  chunk.stage(Range{0, own.begin});
  chunk.stage(Range{own.end, chunk.entry().staged_bytes});
}

bool reduce_slice(Chunk& chunk) {
  if (!chunk.all_filled()) return false;
  chunk.for_each_in(chunk.own_slice(), [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    const auto staged = [&](int r) { return chunk.staging(r) + piece.staged + offset; };
    const auto input = [&](int r) -> const char* {
      return r == chunk.rank() ? chunk.source(piece) + offset : staged(r);
    };
    const auto output = [&](int r) { return r == chunk.rank() ? chunk.result(piece) + offset : staged(r); };
    chunk.reduce(chunk.reduction(piece), input, output, chunk.world().ranks, bytes);
  });
  return true;
}

bool collect_others(Chunk& chunk) {
  if (!chunk.all_reduced()) return false;
  const char* staging = chunk.staging(chunk.rank());
  const auto take = [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    std::memcpy(chunk.result(piece) + offset, staging + piece.staged + offset, bytes);
  };
  const Range own = chunk.own_slice();
  chunk.for_each_in(Range{0, own.begin}, take);
  chunk.for_each_in(Range{own.end, chunk.entry().staged_bytes}, take);
  return true;
}

Claims& claims_of(const Chunk& chunk) { return chunk.world().claims[chunk.index() % kEntries]; }

void reduce_part(Chunk& chunk, Range part) {
  World& world = chunk.world();
  chunk.for_each_in(part, [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    const auto array = [&](int r) { return world.arena(r) + world.mark(piece.slot, r).place + piece.offset + offset; };
    chunk.reduce(chunk.reduction(piece), array, array, world.ranks, bytes);
  });
}

// No waiting: all arrays of a scheduled entry are ready. Once the world is lost, the others' may be in use again.
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
    // Release and acquire: the rank of the last part publishes what all have written.
    if (claims.done.fetch_add(1, std::memory_order_acq_rel) + 1 == parts) {
      claims.finished.post(static_cast<std::uint32_t>(chunk.index() + 1));
    }
  }
}

// The parts that others have claimed.
bool await_all_parts(Chunk& chunk) { return chunk.wait(claims_of(chunk).finished, chunk.index() + 1); }

}  // namespace

const Steps kOneShot{Steps::Memory::kStaging, fill_all, reduce_all, nullptr};
const Steps kTwoShot{Steps::Memory::kStaging, fill_others, reduce_slice, collect_others};

const Steps kDirect{Steps::Memory::kArrays, nullptr, reduce_claimed, await_all_parts};

}  // namespace kvstore_hvd
