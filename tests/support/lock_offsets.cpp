// Prints where the locks of a world lie in its segment: of the tensors' table, and of the schedule.
#include <cstddef>
#include <cstdio>

#include "shm/world.hpp"

int main() {
  using kvstore_hvd::World;
  std::printf("%zu %zu\n", offsetof(World, table_lock), offsetof(World, schedule_lock));
}
