// Arenas; test_programs.cpp has collectives on arrays that lie in them.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ranks.hpp"
#include "shm/arena.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

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
