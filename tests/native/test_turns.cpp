// Operations of one name in the order of the calls, and the memory that names take.
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "mxnet/turns.hpp"

namespace kvstore_hvd::mxnet {
namespace {

using testing::check;
using testing::check_equal;

const bool in_order = testing::add("steps run in the order of the turns", [] {
  Turns turns;
  std::vector<int> steps;
  for (int i = 0; i < 3; ++i) check_equal(turns.take("a"), static_cast<std::uint64_t>(i), "turn");
  turns.use("a", 2, [&] { steps.push_back(2); });
  turns.use("a", 1, [&] { steps.push_back(1); });
  check(steps.empty(), "nobody overtakes turn 0");
  turns.use("a", 0, [&] { steps.push_back(0); });
  check(steps == std::vector<int>{0, 1, 2}, "turn 0 lets the others go");
});

const bool bounded = testing::add("names that are used once are forgotten", [] {
  Turns turns;
  int steps = 0;
  for (std::size_t i = 0; i < 10 * Turns::kKeptNames; ++i) {
    const std::string name = "once/" + std::to_string(i);
    turns.use(name, turns.take(name), [&] { ++steps; });
  }
  check_equal(steps, static_cast<int>(10 * Turns::kKeptNames), "steps");
  check_equal(turns.names(), Turns::kKeptNames, "names");
});

const bool from_threads = testing::add("any thread may use a turn, also of a name that is forgotten meanwhile", [] {
  constexpr int kThreads = 4, kRounds = 2000, kNames = 8;
  Turns turns;
  for (std::size_t i = 0; i < Turns::kKeptNames; ++i)
    turns.use(std::to_string(i), turns.take(std::to_string(i)), [] {});
  // What the steps of a name write is ordered by its turns alone; taking is in order, using is not.
  std::vector<std::vector<int>> steps(kNames);
  std::mutex taking;
  std::vector<int> taken(kNames);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int round = 0; round < kRounds; ++round) {
        const int i = static_cast<int>(random() % kNames);
        const std::string name = "name/" + std::to_string(i);
        int number = 0;
        std::uint64_t turn = 0;
        {
          const std::lock_guard<std::mutex> lock(taking);
          number = taken[i]++;
          turn = turns.take(name);
        }
        turns.use(name, turn, [&steps, i, number] { steps[i].push_back(number); });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  check_equal(turns.names(), Turns::kKeptNames, "names");
  for (int i = 0; i < kNames; ++i) {
    bool ordered = static_cast<int>(steps[i].size()) == taken[i];
    for (int number = 0; ordered && number < taken[i]; ++number) ordered = steps[i][number] == number;
    check(ordered, "all steps of name " + std::to_string(i) + ", in order");
  }
});

}  // namespace
}  // namespace kvstore_hvd::mxnet

int main(int argc, char** argv) { return testing::run(argc, argv); }
