#include "engine/algorithms/algorithm.hpp"

#include <cstring>

namespace kvstore_hvd {

Chunk::Chunk(World& world, int rank, const Pending& pending)
    : world_(world),
      rank_(rank),
      pending_(pending),
      inputs_(std::max(world.ranks, world.hosts)),
      outputs_(world.ranks) {}

void Chunk::stage_to(char* memory, Range range) const {
  for_each_in(range, [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    std::memcpy(memory + piece.staged + offset, source(piece) + offset, bytes);
  });
}

Chunk::Overlap Chunk::overlap(const Piece& piece, const Part& part) const {
  const std::uint64_t begin = std::max<std::uint64_t>(part.from, piece.offset);
  const std::uint64_t end = std::min<std::uint64_t>(part.from + part.bytes, piece.offset + piece.bytes);
  if (begin >= end) return {0, 0, nullptr};
  return {begin - piece.offset, end - begin,
          static_cast<char*>(request(piece).outputs[0]) + part.to + (begin - part.from)};
}

Range Chunk::own_slice() const {
  constexpr std::uint64_t kLine = 64;
  const std::uint64_t bytes = entry_->staged_bytes, ranks = static_cast<std::uint64_t>(world_.ranks);
  const std::uint64_t lines = (bytes + kLine - 1) / kLine;
  const std::uint64_t per_rank = (lines + ranks - 1) / ranks * kLine;
  const std::uint64_t begin = std::min(per_rank * static_cast<std::uint64_t>(rank_), bytes);
  return {begin, std::min(begin + per_rank, bytes)};
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

const Steps& steps_of(Algorithm algorithm) {
  static constexpr Steps kNothing{Steps::Memory::kNone, nullptr, nullptr, nullptr};
  static constexpr Steps kOnDevice{Steps::Memory::kDevice, nullptr, nullptr, nullptr};
  // In the order of Algorithm.
  static constexpr const Steps* kSteps[] = {&kNothing,  &kOneShot, &kTwoShot,       &kBroadcast,
                                            &kDirect,   &kNothing, &kExchange,      &kReduceScatter,
                                            &kOnDevice, &kLinkSum, &kLinkBroadcast, &kLinkExchange};
  return *kSteps[static_cast<int>(algorithm)];
}

}  // namespace kvstore_hvd
