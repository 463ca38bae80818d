// Operations that some ranks of a host have announced and some have not.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "shm/world.hpp"

namespace kvstore_hvd {

struct PartlyAnnounced {
  std::string name;
  std::vector<int> late;  // ranks of the host
};

// Up to `most`; nothing while a rank has the table's lock. Never waits. For messages.
std::vector<PartlyAnnounced> partly_announced(World& world, std::size_t most);

}  // namespace kvstore_hvd
