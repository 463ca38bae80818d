// Ranks that do not come: the others leave in bounded time and say whom they waited for, and after a reset all is well.
#include <atomic>

#include "host/fibers.hpp"
#include "streams.hpp"

namespace kvstore_hvd::gpu::tests {
namespace {

// One failure tells enough.
bool failed() { return testing::failures.load(std::memory_order_relaxed) != 0; }

constexpr u32 kRanks[] = {2, 3, 4, 8};

struct Stop {
  u32 cause, rank, awaited, place;
  explicit Stop(u32 word) : cause(word & 255), rank(word >> 8 & 255), awaited(word >> 16 & 255), place(word >> 24) {}
};

std::unique_ptr<Operation> random_operation(Ranks& ranks, std::mt19937_64& random, u32 kind, u64 timeout_ns) {
  // A ring of long arrays: its ranks use the slots of a FIFO more than once.
  if (kind == 0) return std::make_unique<Around>(ranks, random, 3000, timeout_ns);
  if (kind == 1) return std::make_unique<Exchange>(ranks, random, 500, timeout_ns);
  return std::make_unique<Direct>(ranks, kind == 2 ? "oneshot" : "twoshot", random, 500, timeout_ns);
}

// Runs `operation` on all ranks but `absent`; what that one does instead is `otherwise`, on its first thread.
bool run_without(u32 absent, const Operation& operation, u32 n, u64 seed, const std::function<void()>& otherwise) {
  host::Fibers machine(seed, true);
  return machine.run([](u32) { return 2; }, n, 3,
                     [&](u32 rank) {
                       if (rank != absent) {
                         operation.run();
                       } else if (block() == 0 && thread() == 0) {
                         otherwise();
                       }
                     });
}

void check_afterwards(Ranks& ranks, std::mt19937_64& random) {
  ranks.reset(static_cast<u32>(random()));
  std::vector<std::unique_ptr<Operation>> operations;
  for (u32 kind = 0; kind < 4; ++kind) operations.push_back(random_operation(ranks, random, kind, u64{1} << 62));
  host::Fibers machine(random());
  check(run_streams(machine, operations, std::vector<u32>(ranks.size(), 2), 3), "every thread waits after a reset");
  for (const auto& operation : operations) operation->is_right();
  for (u32 rank = 0; rank < ranks.size(); ++rank) check(ranks.status(rank) == 0, "a status after a reset");
}

const bool timeouts = testing::add("a rank that does not come is named", [] {
  for (u64 seed = 1; seed <= 30 && !failed(); ++seed) {
    for (const u32 n : kRanks) {
      std::mt19937_64 random(seed);
      Ranks ranks(n, 8, 4096, 2);
      const u32 kind = draw(random, 4);
      const auto operation = random_operation(ranks, random, kind, 200'000);
      const u32 absent = draw(random, n);
      const std::string what = operation->what() + ", seed " + std::to_string(seed) + ": ";
      check(run_without(absent, *operation, n, seed, [] {}), what + "some thread waits without end");
      bool stopped = kind == 0;  // of an empty array nobody waits
      for (u32 rank = 0; rank < n; ++rank) {
        if (rank == absent || ranks.status(rank) == 0) continue;
        stopped = true;
        const Stop stop(ranks.status(rank));
        check(stop.cause == kTimeout && stop.rank != absent && stop.rank < n, what + "wrong cause");
        // A rank of a ring may wait for one that waits for the absent one.
        if (kind == 0) {
          const bool neighbour = stop.awaited == (stop.rank + 1) % n || stop.rank == (stop.awaited + 1) % n;
          check(neighbour && (stop.place == kFilledSlot || stop.place == kFreeSlot), what + "wrong neighbour");
        } else {
          check(stop.awaited == absent && stop.place == kStart, what + "the wrong rank is awaited");
        }
      }
      check(stopped, what + "nobody stopped");
      check_afterwards(ranks, random);
    }
  }
});

const bool aborts = testing::add("the host's abort word ends the kernels of all ranks", [] {
  for (u64 seed = 1; seed <= 30 && !failed(); ++seed) {
    for (const u32 n : kRanks) {
      std::mt19937_64 random(seed);
      Ranks ranks(n, 8, 4096, 2);
      const u32 kind = 1 + draw(random, 3);
      const auto operation = random_operation(ranks, random, kind, u64{1} << 62);
      const u32 absent = draw(random, n);
      const u32 aborted = (absent + 1 + draw(random, n - 1)) % n;
      const u32 after = draw(random, 200);
      const std::string what = operation->what() + ", seed " + std::to_string(seed) + ": ";
      const bool ended = run_without(absent, *operation, n, seed, [&] {
        for (u32 i = 0; i < after; ++i) pause();
        store_relaxed(&ranks.abort(aborted), 1);
      });
      check(ended, what + "some thread waits without end");
      for (u32 rank = 0; rank < n; ++rank) {
        if (rank == absent) continue;
        const Stop stop(ranks.status(rank));
        check(stop.cause == kAborted && stop.rank == aborted, what + "wrong status");
      }
      check_afterwards(ranks, random);
    }
  }
});

const bool together = testing::add("ranks that are aborted or slow in the middle of anything leave", [] {
  for (u64 seed = 1; seed <= 150 && !failed(); ++seed) {
    for (const u32 n : kRanks) {
      std::mt19937_64 random(seed);
      Ranks ranks(n, 8, 4096, 2);
      const auto operation = random_operation(ranks, random, draw(random, 4), 200 + draw(random, 20000));
      const bool by_host = draw(random, 2) == 0;
      u32 turns = draw(random, 400);
      host::Fibers machine(seed);
      const bool ended = machine.run([](u32) { return 2; }, n, 3,
                                     [&](u32 rank) {
                                       if (by_host && rank == 0 && block() == 0 && thread() == 0) {
                                         for (; turns > 0; --turns) pause();
                                         store_relaxed(&ranks.abort(0), 1);
                                       }
                                       operation->run();
                                     });
      const std::string what = operation->what() + ", seed " + std::to_string(seed) + ": ";
      check(ended, what + "some thread waits without end");
      for (u32 rank = 0; rank < n; ++rank) {
        if (ranks.status(rank) != 0) continue;
        operation->ended(rank);
        check(operation->is_right(rank), what + "a rank that did not stop has no result");
      }
      check_afterwards(ranks, random);
    }
  }
});

}  // namespace
}  // namespace kvstore_hvd::gpu::tests

int main(int argc, char** argv) { return testing::run(argc, argv); }
