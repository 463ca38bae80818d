// The root stages its array, and all copy it.
#include <cstring>

#include "engine/algorithms/algorithm.hpp"

namespace kvstore_hvd {
namespace {

void fill(Chunk& chunk) {
  if (chunk.entry().root == chunk.rank()) chunk.stage(chunk.all());
}

bool copy(Chunk& chunk) {
  const bool is_root = chunk.entry().root == chunk.rank();
  if (!is_root && !chunk.has_filled(chunk.entry().root)) return false;
  const char* staged = chunk.staging(chunk.entry().root);
  chunk.for_each_in(chunk.all(), [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    const Request& request = chunk.request(piece);
    if (is_root && request.inputs[0] == request.outputs[0]) return;
    std::memcpy(chunk.result(piece) + offset, staged + piece.staged + offset, bytes);
  });
  return true;
}

}  // namespace

const Steps kBroadcast{Steps::Memory::kStaging, fill, copy, nullptr};

}  // namespace kvstore_hvd
