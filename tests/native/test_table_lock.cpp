// The lock of the tensor table: who is said to hold it, and when memory runs out under it.
#include <cstdlib>
#include <new>
#include <string>
#include <thread>

#include "check.hpp"
#include "engine/tensor_table.hpp"
#include "ranks.hpp"
#include "shm/alarm.hpp"
#include "shm/world.hpp"

namespace {

// How many allocations of this thread succeed before one fails; less than 0: all of them do.
thread_local int allocations_left = -1;

void* allocate(std::size_t bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace kvstore_hvd {
namespace {

using testing::check;
using testing::check_equal;

const bool released = testing::add("whatever allocation fails, the table's lock is free again", [] {
  const auto segment = Segment::create(2);
  World& world = segment->world();
  Alarm here(world, 0, std::chrono::seconds(1)), there(world, 1, std::chrono::seconds(1));
  TensorTable table(world, here), other(world, there);
  std::vector<float> data(6);
  for (const char* name : {"a name that is too long to lie in a string", "another name that is too long for that"}) {
    Request request = allreduce(name, data);
    request.shape = {1, 2, 3};
    const auto slot = other.find(name);
    check(slot && other.announce(*slot, request) == TensorTable::Outcome::kWaiting, "the other rank waits");
  }
  int failed = 0;
  for (bool done = false; !done;) {
    allocations_left = failed;
    std::optional<std::vector<Missed>> missed;
    try {
      missed = table.missed(64, true);
      done = true;
    } catch (const std::bad_alloc&) {
      ++failed;
    }
    allocations_left = -1;
    if (done) check_equal(missed.value_or(std::vector<Missed>{}).size(), std::size_t{2}, "what is missed");
    if (!check(world.table_lock.try_lock(0), "after allocation " + std::to_string(failed))) return;
    world.table_lock.unlock();
  }
  check(failed > 4, "allocations under the lock: " + std::to_string(failed));
});

const bool named = testing::add("who had to wait for the lock is named while it holds it", [] {
  const auto segment = Segment::create(3);
  World& world = segment->world();
  Alarm first(world, 0, std::chrono::seconds(60)), second(world, 1, std::chrono::seconds(60));
  Alarm third(world, 2, std::chrono::milliseconds(100));
  world.table_lock.lock(first);
  std::thread waiter([&] { world.table_lock.lock(second); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  world.table_lock.unlock();
  waiter.join();
  try {
    world.table_lock.lock(third);
    check(false, "it is held");
  } catch (const WorldLost&) {
  }
  const std::string fact = world.failure.fact();
  check(fact.find("waited too long for rank 1, which stopped") != std::string::npos, fact);
});

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }
