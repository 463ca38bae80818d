// The queue of slots from many ranks to one.
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "shm/wait.hpp"

namespace kvstore_hvd {
namespace {

using testing::check;

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

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }
