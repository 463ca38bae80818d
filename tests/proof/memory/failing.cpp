// The failure of a world, and locks whose holder dies: whoever waits learns of it.
#include "checker.hpp"
#include "shm/world.hpp"

namespace proof::failing {

using namespace kvstore_hvd;

const WaitPolicy kSleeps;  // at once

World& bare_world(Program& program, int ranks) {
  World& world = program.shared_zeros<World>(sizeof(World) + sizeof(RankState) * static_cast<std::size_t>(ranks + 1));
  world.ranks = world.parties = world.size = ranks;
  world.layout.ranks = sizeof(World);
  return world;
}

// What a rank does in a critical section: it must find what the last one left.
void add_one(World& world, std::uint32_t& counter, int rank) {
  Alarm alarm(world, rank, std::chrono::hours(1));
  const SharedLockGuard guard(world.table_lock, alarm);
  counter += 1;
}

const Litmus lock("three ranks take a lock", [](Program& program) {
  program.is_large = true;
  World& world = bare_world(program, 3);
  for (int rank : {0, 1, 2}) {
    program.thread([&world, rank] { add_one(world, world.next_order, rank); });
  }
  program.end = [&world] { require(world.next_order == 3, "two ranks were in the critical section"); };
});

const Litmus lock_of_two("two ranks take a lock", [](Program& program) {
  World& world = bare_world(program, 2);
  for (int rank : {0, 1}) {
    program.thread([&world, rank] {
      add_one(world, world.next_order, rank);
      const SharedLockGuard tried(world.table_lock, rank, std::try_to_lock);
      if (tried.owns_lock()) world.next_order += 1;
    });
  }
});

// Its watcher: the rank notices that another one has died, and tells all.
void watch(World& world, int rank, int other) {
  if (!died(other)) return;
  Alarm alarm(world, rank, std::chrono::hours(1));
  alarm.raise(ErrorCode::kPeerLost, "died");
}

// Returns whether the world has failed.
bool is_lost(World& world, const std::function<void()>& body) {
  try {
    body();
    return false;
  } catch (const WorldLost&) {
    require(world.failure.code() == ErrorCode::kPeerLost && world.failure.fact() == "died", "another fact");
    return true;
  }
}

const Litmus dies_with_lock("a rank dies with a lock", [](Program& program) {
  program.sleeps_end = true;  // one that looked just before may sleep for kMaxSleep
  World& world = bare_world(program, 2);
  program.mortal_thread([&world] { add_one(world, world.next_order, 0); });
  program.thread([&world] { is_lost(world, [&world] { add_one(world, world.clock_hand, 1); }); });
  program.thread([&world] { watch(world, 1, 0); });
});

const Litmus dies_before_post("a rank dies before it posts", [](Program& program) {
  World& world = bare_world(program, 2);
  program.mortal_thread([&world] { world.rank(0).filled.post(1); });
  program.thread([&world] {
    is_lost(world, [&world] {
      while (!world.rank(0).filled.wait(1, kSleeps, world.failure)) {
      }
    });
  });
  program.thread([&world] { watch(world, 1, 0); });
});

const Litmus two_fail("two ranks fail the world, one dies on the way", [](Program& program) {
  World& world = bare_world(program, 3);
  const auto fail = [&world](int rank) { world.failure.set(rank, ErrorCode::kPeerLost, "died"); };
  program.mortal_thread([fail] { fail(0); });
  program.thread([fail] { fail(1); });
  program.thread([&world] {
    if (is_lost(world, [&world] { world.failure.check(); })) world.failure.code();
  });
  program.end = [&world] { require(world.failure.is_set(), "the world has not failed"); };
});

}  // namespace proof::failing
