// Allreduces through staging memory.
//
// One-shot: every rank stages its contribution, and reduces those of all into its own result.
//
// Two-shot: every rank reduces one slice for all: it reads the others' contributions to it from their staging memories,
// writes the result back there, and copies the other slices from its own. Each staging line moves between two cores
// exactly twice and is never shared for reading: rewriting a line that other cores hold copies of costs more.
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
    chunk.reduce_to_own(piece, input, chunk.result(piece) + offset, bytes);
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
    chunk.reduce_to_all(piece, input, output, bytes);
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

}  // namespace

const Steps kOneShot{Steps::Memory::kStaging, fill_all, reduce_all, nullptr};
const Steps kTwoShot{Steps::Memory::kStaging, fill_others, reduce_slice, collect_others};

}  // namespace kvstore_hvd
