// Pieces of text that errors and reports share.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shm/world.hpp"

namespace kvstore_hvd {

// The longest beginning of `text` of at most `bytes` bytes that does not end inside a character.
std::string_view utf8_prefix(std::string_view text, std::size_t bytes);

// "(256, 784)", "(3,)", "()".
std::string describe_shape(const Signature& signature);

// Ranks are named by those in the world of all.

// "rank 3".
std::string rank_name(World& world, int rank);

// "rank 3", "ranks 0-2, 5"; `ranks` ascending, not empty. The second: of numbers in the world of all.
std::string describe_ranks(World& world, const std::vector<int>& ranks);
std::string describe_ranks(const std::vector<int>& ranks);

// The same by its number in this world, of whatever host.
std::string describe_member(World& world, int rank_of_world);
// "rank 2 (node1, pid 8123) and rank 5 (node1, pid 8126)"; the first eight, and "and ranks 9-12".
std::string describe_members(World& world, const std::vector<int>& ranks_of_world);

// "host node1 (ranks 4-7)"; its number where its name is not known.
std::string describe_host(World& world, int host);

// "rank 2 (node1, pid 8123)".
std::string describe_rank(World& world, int rank);

// Who speaks: "[rank 2/8] ", "[rank 5/8, rank 1/2 in process set 3] ".
std::string describe_speaker(World& world, int rank);

}  // namespace kvstore_hvd
