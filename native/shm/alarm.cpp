#include "shm/alarm.hpp"

#include "shm/describe.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

const Failure& Alarm::failure() const { return world_.failure; }

std::string Alarm::name_of(int rank) const { return rank_name(world_, rank); }

void Alarm::raise(ErrorCode code, std::string_view fact) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!world_.failure.set(rank_, code, fact)) return;
  }
  wake_all(world_);
}

}  // namespace kvstore_hvd
