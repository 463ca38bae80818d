// Flags and inboxes: what a poster wrote is seen, and no sleeper is left asleep.
#include "checker.hpp"
#include "shm/wait.hpp"

namespace proof::waiting {

using namespace kvstore_hvd;

const WaitPolicy kSleeps;  // at once

struct Shared {
  Failure failure;
  Flag flag, other;
  Inbox<2> inbox;
  std::uint64_t data[4];
};

void wait_for(Shared& shared, Flag& flag, std::uint32_t target) {
  while (!flag.wait(target, kSleeps, shared.failure)) {
  }
}

// A rank posts twice; sleepers await the second post, or one after the other.
void define_posts(Program& program, int sleepers, bool one_by_one) {
  Shared& shared = program.shared_zeros<Shared>();
  program.thread([&] {
    for (std::uint32_t step : {0, 1}) {
      shared.data[step] = 1;
      shared.flag.post(step + 1);
    }
  });
  for (int sleeper = 0; sleeper < sleepers; ++sleeper) {
    program.thread([&shared, one_by_one] {
      for (std::uint32_t step : {0, 1}) {
        if (step == 0 && !one_by_one) continue;
        wait_for(shared, shared.flag, step + 1);
        require(shared.data[0] == 1 && shared.data[step] == 1, "data");
      }
    });
  }
}

const Litmus posts("two posts, a sleeper for the second", [](Program& program) { define_posts(program, 1, false); });
const Litmus posts_one_by_one("two posts, a sleeper for each", [](Program& program) {
  program.spurious_wakes = 1;
  define_posts(program, 1, true);
});
const Litmus two_sleepers("two posts, two sleepers", [](Program& program) {
  program.is_large = true;
  define_posts(program, 2, false);
});

// The bell, and an inbox: two ring, the owner looks, and sleeps when there is nothing.
const Litmus inbox("two ranks fill an inbox and ring the bell", [](Program& program) {
  Shared& shared = program.shared_zeros<Shared>();
  for (std::uint32_t writer : {0, 1}) {
    program.thread([&shared, writer] {
      shared.data[writer] = 1;
      shared.inbox.put(writer);
      shared.flag.ring();
    });
  }
  program.thread([&] {
    for (std::uint32_t taken = 0; taken < 2;) {
      const std::uint32_t seen = shared.flag.value();
      if (const auto slot = shared.inbox.get(taken)) {
        require(shared.data[*slot] == 1, "data");
        ++taken;
      } else {
        shared.flag.wait_change(seen, kSleeps, kMaxSleep, shared.failure);
      }
    }
  });
});

// As Doorbell: the sleeper sleeps elsewhere.
const Litmus doorbell("a sleeper that sleeps elsewhere", [](Program& program) {
  Shared& shared = program.shared_zeros<Shared>();
  program.thread([&] {
    shared.inbox.put(1);
    if (shared.flag.ring_and_is_asleep()) shared.other.post(1);
  });
  program.thread([&] {
    const std::uint32_t seen = shared.flag.value();
    if (shared.inbox.get(0)) return;
    if (shared.flag.may_sleep(seen)) wait_for(shared, shared.other, 1);
    require(shared.inbox.get(0).has_value(), "nothing in the inbox");
  });
});

const Litmus both_post("two post, then look: one sees both", [](Program& program) {
  Shared& shared = program.shared_zeros<Shared>();
  for (int own : {0, 1}) {
    program.thread([&shared, own] {
      (own == 0 ? shared.flag : shared.other).post(1);
      shared.data[own] = (own == 0 ? shared.other : shared.flag).reached_after_post(1);
    });
  }
  program.end = [&] { require(shared.data[0] + shared.data[1] > 0, "neither sees the other"); };
});

}  // namespace proof::waiting
