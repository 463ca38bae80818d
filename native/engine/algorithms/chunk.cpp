#include "engine/algorithms/chunk.hpp"

#include <cstring>

namespace kvstore_hvd {

Chunk::Chunk(World& world, int rank, const std::function<const Request&(std::uint32_t)>& request_of)
    : world_(world), rank_(rank), request_of_(request_of), inputs_(world.ranks), outputs_(world.ranks) {}

void Chunk::stage(Range range) const {
  char* memory = staging(rank_);
  for_each_in(range, [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    std::memcpy(memory + piece.staged + offset, source(piece) + offset, bytes);
  });
}

bool Chunk::wait(Flag& flag, std::uint64_t target) const {
  return flag.wait(static_cast<std::uint32_t>(target), *policy_, world_.failure);
}

bool Chunk::all_at(Flag RankState::* flag, std::uint64_t target) const {
  for (int r = 0; r < world_.ranks; ++r) {
    if (r != rank_ && !wait(world_.rank(r).*flag, target)) return false;
  }
  return true;
}

}  // namespace kvstore_hvd
