// Small units that need no world: the queue of slots from many ranks to one, time in which this process did not run,
// and the order of operations of one name.
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>

#include "base/process.hpp"
#include "check.hpp"
#include "mxnet/turns.hpp"
#include "shm/wait.hpp"

namespace kvstore_hvd {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::check;
using testing::check_equal;

const bool writers = testing::add("nothing is lost between writers, and what they wrote before is visible", [] {
  constexpr std::uint32_t kWriters = 3, kRounds = 20000;
  const auto inbox = std::make_unique<Inbox<4>>();
  // As slots are used: a writer's next message waits until its last one was taken.
  std::vector<std::uint32_t> written(kWriters);
  std::vector<std::atomic<std::uint32_t>> seen(kWriters);
  std::vector<std::thread> threads;
  for (std::uint32_t w = 0; w < kWriters; ++w) {
    threads.emplace_back([&, w] {
      for (std::uint32_t round = 1; round <= kRounds; ++round) {
        written[w] = round;
        inbox->put(w);
        while (seen[w].load(std::memory_order_acquire) != round) std::this_thread::yield();
      }
    });
  }
  bool right = true;
  for (std::uint32_t taken = 0; taken < kWriters * kRounds;) {
    const auto writer = inbox->get(taken);
    if (!writer) {
      std::this_thread::yield();
      continue;
    }
    ++taken;
    const std::uint32_t round = seen[*writer].load(std::memory_order_relaxed) + 1;
    right = right && written[*writer] == round;
    seen[*writer].store(round, std::memory_order_release);
  }
  for (std::thread& thread : threads) thread.join();
  check(right, "each message once, with what was written before it");
});

const bool patience = testing::add("a limit stands still while the process does", [] {
  Patience limit(seconds(2));
  auto now = Clock::now();
  check(!limit.is_over(now += milliseconds(900)), "0.9 s");
  check(!limit.is_over(now += seconds(100)), "a pause counts as a moment");
  check(!limit.is_over(now += milliseconds(900)), "1.9 s");
  check(limit.is_over(now += milliseconds(200)), "2.1 s");
});

const bool standstills = testing::add("what overlaps with times in which the process did not run is told", [] {
  const auto start = Clock::now();
  const auto at = [start](double s) { return start + milliseconds(static_cast<int>(s * 1000)); };
  Standstills pauses(start);
  for (const double s : {0.5, 1.0, 31.0, 31.5, 41.5})
    pauses.look(at(s));  // it stood still from 1 to 31 and 31.5 to 41.5
  check(pauses.between(at(0.2), at(41.5)) == milliseconds(29900 + 9900), "both");
  check(pauses.between(at(31.2), at(41.5)) == milliseconds(9900), "the second");
  check(pauses.between(at(11), at(31.5)) == milliseconds(19900), "a part of the first");
  check(pauses.between(at(41.5), at(42)) == milliseconds(0), "none");
  check(pauses.between(at(41.7), at(51.7)) == milliseconds(9900), "one that has just ended, before the next look");
  for (int i = 0; i < 1000; ++i) pauses.look(at(60 + 2 * i));
  check(pauses.between(at(0), at(2058)) < seconds(257 * 2), "no more of them are kept than matter");
});

const bool from_threads = testing::add("any thread may use a turn, in order, also of a name forgotten meanwhile", [] {
  constexpr int kThreads = 4, kRounds = 2000, kNames = 8;
  mxnet::Turns turns;
  for (std::size_t i = 0; i < mxnet::Turns::kKeptNames; ++i)
    turns.use(std::to_string(i), turns.take(std::to_string(i)), [] {});
  // What the steps of a name write is ordered by its turns alone; taking is in order, using is not.
  std::vector<std::vector<int>> steps(kNames);
  std::mutex taking;
  std::vector<int> taken(kNames);
  testing::on_threads(kThreads, [&](int t) {
    std::mt19937 random(static_cast<unsigned>(t));
    for (int round = 0; round < kRounds; ++round) {
      const int i = static_cast<int>(random() % kNames);
      const std::string name = "name/" + std::to_string(i);
      int number = 0;
      std::uint64_t own[2]{};
      {
        const std::lock_guard<std::mutex> lock(taking);
        number = std::exchange(taken[i], taken[i] + 2);
        for (std::uint64_t& turn : own) turn = turns.take(name);
      }
      const int first = static_cast<int>(random() % 2);
      for (const int one : {first, 1 - first}) {
        turns.use(name, own[one], [&steps, i, number, one] { steps[i].push_back(number + one); });
      }
    }
  });
  check_equal(turns.names(), mxnet::Turns::kKeptNames, "names");
  for (int i = 0; i < kNames; ++i) {
    bool ordered = static_cast<int>(steps[i].size()) == taken[i];
    for (int number = 0; ordered && number < taken[i]; ++number) ordered = steps[i][number] == number;
    check(ordered, "all steps of name " + std::to_string(i) + ", in order");
  }
});

}  // namespace
}  // namespace kvstore_hvd
