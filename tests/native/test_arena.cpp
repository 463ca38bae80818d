// Arenas; test_programs.cpp has collectives on arrays that lie in them.
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <string>

#include "check.hpp"
#include "ranks.hpp"
#include "reduce/reduce.hpp"
#include "shm/arena.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

using testing::check;

constexpr std::size_t kArena = std::size_t{64} << 20;

const bool allocator = testing::add("an arena hands out memory that never overlaps, and takes all of it back", [] {
  const auto segment = Segment::create(2, kArena);
  Arena arena(segment, 1);
  std::mt19937 random(7);
  std::map<char*, std::size_t> held;
  for (int step = 0; step < 20000; ++step) {
    if (held.empty() || random() % 5 < 3) {
      const std::size_t bytes = random() % (std::size_t{1} << (random() % 20));
      auto* memory = static_cast<char*>(arena.allocate(bytes));
      if (memory == nullptr) {
        check(arena.used() > kArena / 2, "full although half of it is free");
        continue;
      }
      check(reinterpret_cast<std::uintptr_t>(memory) % Arena::kAlignment == 0, "not aligned");
      check(arena.contains(memory) && (bytes == 0 || arena.contains(memory + bytes - 1)), "outside of the arena");
      const auto next = held.lower_bound(memory);
      check(next == held.end() || memory + bytes <= next->first, "overlaps the next");
      check(next == held.begin() || std::prev(next)->first + std::prev(next)->second <= memory,
            "overlaps the previous");
      held.emplace(memory, bytes);
    } else {
      auto victim = held.begin();
      std::advance(victim, random() % std::min<std::size_t>(held.size(), 50));
      arena.free(victim->first);
      held.erase(victim);
    }
  }
  for (const auto& [memory, bytes] : held) arena.free(memory);
  check(arena.used() == 0, "something is still in use");
  check(arena.allocate(kArena) != nullptr, "free neighbours were not joined");
  check(arena.allocate(1) == nullptr, "more than there is");
});

const bool forked = testing::add("a forked child has a copy of all that was allocated, however much came last", [] {
  if (thread_sanitizer()) return;
  const auto segment = Segment::create(1, std::size_t{8} << 20);
  Arena arena(segment, 0);
  std::vector<char*> blocks;
  for (const std::size_t bytes : {std::size_t{1} << 20, std::size_t{1} << 20, std::size_t{64}}) {
    blocks.push_back(static_cast<char*>(arena.allocate(bytes)));
    blocks.back()[bytes - 1] = static_cast<char>(blocks.size());
  }
  const bool is_same = succeeds_in_child([&] {
    arena.after_fork_in_child();
    const bool same = blocks[0][(1 << 20) - 1] == 1 && blocks[1][(1 << 20) - 1] == 2 && blocks[2][63] == 3;
    blocks[2][63] = 7;
    return same;
  });
  check(is_same, "the child reads what there was");
  check(blocks[2][63] == 3, "the parent does not see what it writes");
  auto* const world = reinterpret_cast<volatile char*>(&segment->world());
  check(!succeeds_in_child([&] { return *world = *world, true; }), "the child has the world of its parent");
});

constexpr std::size_t kPage = 4096;

const bool isolated =
    testing::add("others cannot change what lies in an isolated arena, and no write to it is lost", [] {
      if (thread_sanitizer()) return;  // it takes a new mapping for a write, and has no threads after fork
      const auto segment = Segment::create(2, kArena), others = Segment::attach(segment->fd());
      Arena arena(segment, 1);
      constexpr std::size_t kPages = 2000;
      constexpr int kThreads = 2;
      auto* const large = static_cast<char*>(arena.allocate(kPages * kPage));
      auto* const small = static_cast<char*>(arena.allocate(100));
      small[99] = 5;
      std::atomic<bool> stop{false};
      std::atomic<int> begun{0}, lost{0};
      std::vector<std::thread> threads;
      for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
          const auto own = [&](std::size_t page)->volatile int& {
            return reinterpret_cast<volatile int*>(large + page * kPage)[t];
          };
          for (int round = 0; !stop.load() || round < 2; ++round) {
            for (std::size_t page = 0; page < kPages; ++page) {
              if (own(page) != round) ++lost;
              own(page) = round + 1;
            }
            if (round == 0) ++begun;
          }
        });
      }
      while (begun.load() < kThreads) std::this_thread::yield();
      arena.isolate();
      std::memset(others->world().arena(1), 99, kPages * kPage + 200);
      stop.store(true);
      for (auto& thread : threads) thread.join();
      check(lost.load() == 0, std::to_string(lost.load()) + " writes were lost");
      check(small[99] == 5 && small[0] == 0, "others can change it");
      check(arena.allocate(1) == nullptr, "new memory would be the others' too");
      arena.isolate();
      check(small[99] == 5, "a second time changes nothing");
      const bool is_same = succeeds_in_child([&] {
        arena.after_fork_in_child();
        return std::exchange(small[99], 7) == 5;
      });
      check(is_same, "a forked child reads what there is");
      check(small[99] == 5, "and has a copy of its own");
    });

const bool not_isolated = testing::add("an arena of which the system makes no copy stays as it is", [] {
  if (thread_sanitizer()) return;  // the limit ends ThreadSanitizer itself
  const auto segment = Segment::create(1, kArena), others = Segment::attach(segment->fd());
  Arena arena(segment, 0);
  auto* const array = static_cast<char*>(arena.allocate(kArena / 2));
  array[kArena / 2 - 1] = 5;
  rlimit before{};
  getrlimit(RLIMIT_DATA, &before);
  const rlimit nothing{1, before.rlim_max};
  setrlimit(RLIMIT_DATA, &nothing);
  const bool is_isolated = arena.isolate();
  const bool is_refused =
      mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED;
  setrlimit(RLIMIT_DATA, &before);
  if (!is_refused) return;  // this system knows no such limit
  check(!is_isolated, "the caller is told");
  check(array[kArena / 2 - 1] == 5, "its content");
  others->world().arena(0)[1] = 7;
  check(array[1] == 7 && arena.allocate(1) != nullptr, "it is shared and used as before");
});

// Holds the ranks that write to rank 0's array: rank 0 until rank 1 is about to, and rank 1 until it may go on. Each
// has a mapping of its own, whose pages refuse the first write.
struct Held {
  char* arrays[2];  // as the ranks see it
  std::size_t bytes;
  int arrived[2], go_on[2];  // pipes
} held;

void on_refused_write(int, siginfo_t* info, void*) {
  const auto* const address = static_cast<const char*>(info->si_addr);
  char byte = 0;
  for (const int rank : {0, 1}) {
    if (address < held.arrays[rank] || address >= held.arrays[rank] + held.bytes) continue;
    if (rank == 1 && write(held.arrived[1], "12", 2) != 2) _exit(3);  // for rank 0, and for the test
    if (read(rank == 1 ? held.go_on[0] : held.arrived[0], &byte, 1) != 1) _exit(4);
    mprotect(held.arrays[rank], held.bytes, PROT_READ | PROT_WRITE);
    return;
  }
  _exit(5);
}

const bool late_write =
    testing::add("a rank that was stopped while it wrote changes no array of a failed operation", [] {
      const auto segment = Segment::create(2, kArena), others = Segment::attach(segment->fd());
      constexpr std::size_t kCount = std::size_t{4} << 20;
      constexpr float kNew = -7;
      Engine late(others, 1, thread_options());
      Arena of_late(others, 1);
      held.bytes = kCount * sizeof(float);
      std::thread second;
      {
        Engine engine(segment, 0, thread_options());
        const auto arena = std::make_shared<Arena>(segment, 0);
        engine.protect(arena);
        auto* const array = static_cast<float*>(arena->allocate(held.bytes));
        std::fill_n(array, kCount, 1.0F);
        held.arrays[0] = reinterpret_cast<char*>(array);
        held.arrays[1] = others->world().arena(0) + (held.arrays[0] - segment->world().arena(0));
        check(pipe(held.arrived) == 0 && pipe(held.go_on) == 0, "pipes");
        struct sigaction action{}, before{};
        action.sa_sigaction = on_refused_write;
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGSEGV, &action, &before);
        for (char* const its : held.arrays) mprotect(its, held.bytes, PROT_READ);

        auto* const its_array = static_cast<float*>(of_late.allocate(held.bytes));
        std::fill_n(its_array, kCount, 2.0F);
        second =
            std::thread([&late, request = allreduce("x", its_array, kCount)] { static_cast<void>(late.run(request)); });
        const auto work = engine.submit(allreduce("x", array, kCount));
        char byte = 0;
        check(read(held.arrived[0], &byte, 1) == 1, "rank 1 writes");
        engine.abort("nobody waits for rank 1");
        check(engine.wait(*work).code() == ErrorCode::kTransport, work->status().text());
        std::fill_n(array, kCount, kNew);
        check(write(held.go_on[1], "", 1) == 1, "rank 1 goes on");
        second.join();
        check(its_array[0] == 3.0F || its_array[kCount - 1] == 3.0F, "rank 1 has summed nothing");
        check(std::count(array, array + kCount, kNew) == kCount, "rank 1 has written to an array that is in use again");
        sigaction(SIGSEGV, &before, nullptr);
        for (const int fd : {held.arrived[0], held.arrived[1], held.go_on[0], held.go_on[1]}) close(fd);
      }
    });

const bool dropped = testing::add("a forked child that drops the segment keeps what lies in its place", [] {
  if (thread_sanitizer()) return;
  auto segment = Segment::create(1, 1);
  const bool is_kept = succeeds_in_child([&] {
    // Nothing of the segment is there, so the system may give the child this memory.
    void* place = mmap(&segment->world(), 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (place == MAP_FAILED) return false;
    std::memset(place, 7, 4096);
    segment.reset();
    return static_cast<char*>(place)[4095] == 7;
  });
  check(is_kept, "the child");
});

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }
