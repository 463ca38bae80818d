// Every rank stages its contribution, and reduces those of all into its own result.
#include "engine/algorithms/algorithm.hpp"

namespace kvstore_hvd {
namespace {

void fill(Chunk& chunk) { chunk.stage(chunk.all()); }

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

}  // namespace

const Steps kOneShot{Steps::Memory::kStaging, fill, reduce_all, nullptr};

}  // namespace kvstore_hvd
