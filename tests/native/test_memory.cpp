// Memory: the lock of the tensor table when it runs out, and what a transport gives back.
#include <atomic>
#include <cstdlib>
#include <new>
#include <string>

#include "check.hpp"
#include "engine/tensor_table.hpp"
#include "link/transport.hpp"
#include "ranks.hpp"
#include "shm/wait.hpp"
#include "shm/world.hpp"

namespace {

// How many allocations of this thread succeed before one fails; less than 0: all of them do.
thread_local int allocations_left = -1;
std::atomic<std::ptrdiff_t> allocated{0};  // pieces, of all threads

void* allocate(std::size_t bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  ++allocated;
  return memory;
}

void give_back(void* memory) {
  if (memory != nullptr) --allocated;
  std::free(memory);
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { give_back(memory); }
void operator delete[](void* memory) noexcept { give_back(memory); }
void operator delete(void* memory, std::size_t) noexcept { give_back(memory); }
void operator delete[](void* memory, std::size_t) noexcept { give_back(memory); }

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

const bool freed = testing::add("what was sent, has come, or is under way leaves nothing behind", [] {
  const auto connected = [] {
    std::vector<std::shared_ptr<Transport>> ends;
    for (const auto& sockets : tcp_connections(2)) ends.push_back(tcp_transport(sockets));
    return ends;
  };
  std::vector<char> content(1000), large(32 << 20);  // `large` does not go into the buffers of a socket
  for (const int messages : {1, 0, 50}) {
    const auto before = allocated.load();
    {
      const auto ends = connected();
      for (int i = 0; i < messages; ++i) {
        auto sending = ends[0]->send(1, kRecords, content.data(), content.size());
        auto receiving = ends[1]->receive(0, kRecords, content.data(), content.size());
        while (!ends[0]->test(sending) || !ends[1]->test(receiving)) ends[1]->progress();
      }
      if (messages > 0) {
        static_cast<void>(ends[0]->send(1, kPartials, large.data(), large.size()));
        static_cast<void>(ends[0]->receive(1, kPartials, content.data(), content.size()));
      }
    }
    const std::ptrdiff_t left = allocated.load() - before;
    if (messages == 1) continue;  // what the first transport and its messages make once stays
    check_equal(left, std::ptrdiff_t{0}, "what is left of " + std::to_string(messages) + " messages");
  }
});

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }
