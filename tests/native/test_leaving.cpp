// What is left of a world when a rank has left it, and calls that are still on their way out; ranks are threads.
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/process.hpp"
#include "check.hpp"
#include "ranks.hpp"
#include "shm/arena.hpp"

namespace kvstore_hvd {
namespace {

using testing::check;
using testing::check_equal;

const bool closed_gate = testing::add("the last one out of a closed gate cleans up, and only that one", [] {
  for (int round = 0; round < (thread_sanitizer() ? 300 : 1000); ++round) {
    Gate gate;
    int plain = 0;  // what is cleaned up: not atomic, for ThreadSanitizer to see
    std::atomic<int> cleaned{0}, inside{0};
    check(gate.enter(), "it is open");
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        while (gate.enter()) {
          inside.fetch_add(1);
          static_cast<void>(*const_cast<volatile int*>(&plain));
          if (gate.leave()) {
            plain = 1;
            cleaned.fetch_add(1);
          }
        }
      });
    }
    if (round % 2 == 0) {
      while (inside.load() == 0) std::this_thread::yield();
    }
    gate.close();
    if (gate.leave()) {
      plain = 1;
      cleaned.fetch_add(1);
    }
    for (auto& thread : threads) thread.join();
    check_equal(cleaned.load(), 1, "cleaned up");
    check(!gate.enter(), "it stays closed");
  }
});

const bool kept = testing::add("a world that is left is given back at once, whoever keeps the engine", [] {
  auto segment = Segment::create(3);
  const std::weak_ptr<Segment> world = segment;
  std::vector<std::shared_ptr<Engine>> engines;
  for (int rank = 0; rank < 3; ++rank) engines.push_back(std::make_shared<Engine>(segment, rank, thread_options()));
  segment.reset();
  std::vector<std::thread> threads;
  for (const auto& engine : engines) {
    threads.emplace_back([engine] {
      engine->start_timeline(10);
      check(barrier(*engine).ok(), "all are there");
      engine->shutdown();
    });
  }
  for (auto& thread : threads) thread.join();
  check(world.expired(), "nobody has the segment");
  for (int rank = 0; rank < 3; ++rank) {
    Engine& engine = *engines[static_cast<std::size_t>(rank)];
    std::vector<float> data(4);
    const auto says = [&](const Status& status) {
      return status.code() == ErrorCode::kShutdown &&
             status.text().find("[rank " + std::to_string(rank) + "/3] allreduce 'x': this rank has shut down.") == 0;
    };
    check(says(engine.run(allreduce("x", data))), "run");
    const auto work = engine.submit(allreduce("x", data));
    check(work->done() && says(work->status()) && engine.wait_briefly(*work) && engine.is_met(*work), "submit");
    engine.submit_to_wait(work);
    check(says(engine.wait(*work)), "submitted again");
    check(says(engine.submit_and_linger(allreduce("x", data))->status()), "linger");
    check(engine.wait_for_all(std::chrono::seconds(0)), "nothing is pending");
    check(engine.health().ok() && !engine.segment(), "health and segment");
    check(engine.waiting({})->empty() && engine.missed(10)->empty() && engine.report().names.empty(), "reports");
    check(engine.process(0).pid == 0 && !engine.take_batch({}) && !engine.end_batch(0), "the others, and devices");
    check_equal(engine.take_timeline().events.size(), std::size_t{1}, "what was recorded");
    check_equal(engine.take_timeline().events.size(), std::size_t{0}, "once");
    engine.abort("nobody hears it");
    check(engine.shutdown("nor this"), "again");
  }
});

const bool under_way = testing::add("calls that are under way while a rank leaves", [] {
  for (int round = 0; round < (thread_sanitizer() ? 10 : 40); ++round) {
    auto segment = Segment::create(2);
    const std::weak_ptr<Segment> world = segment;
    std::vector<std::thread> threads;
    std::vector<std::shared_ptr<Engine>> engines;
    for (int rank = 0; rank < 2; ++rank) engines.push_back(std::make_shared<Engine>(segment, rank, thread_options()));
    segment.reset();
    std::atomic<bool> stop{false};
    for (int rank = 0; rank < 2; ++rank) {
      Engine& engine = *engines[static_cast<std::size_t>(rank)];
      threads.emplace_back([&engine, &stop] {
        while (!stop.load()) {
          static_cast<void>(engine.health());
          static_cast<void>(engine.waiting({}));
          static_cast<void>(engine.missed(4));
          static_cast<void>(engine.process(0));
          static_cast<void>(engine.take_batch({}));
        }
      });
      threads.emplace_back([&engine, &stop, rank] {
        std::vector<float> data(10);
        for (int i = 0; !stop.load(); ++i) {
          // As many on both ranks or not: what is left when one of them leaves fails.
          const Status status = engine.run(allreduce("x" + std::to_string(i % 3), data));
          check(status.ok() || status.code() == ErrorCode::kShutdown || status.code() == ErrorCode::kPeerLost,
                std::to_string(rank) + ": " + status.text());
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100 * (round % 7)));
    std::vector<std::thread> leaving;
    for (const auto& engine : engines) {
      leaving.emplace_back([&] { engine->shutdown(); });
      leaving.emplace_back([&] { engine->shutdown(round % 3 == 0 ? "the test says so" : ""); });
    }
    for (auto& thread : leaving) thread.join();
    stop.store(true);
    for (auto& thread : threads) thread.join();
    check(world.expired(), "nobody has the segment");
  }
});

const bool retired_arena = testing::add("an arena keeps the segment as long as arrays lie in it, and no longer", [] {
  auto segment = Segment::create(1, 1 << 20);
  const std::weak_ptr<Segment> world = segment;
  const auto arena = std::make_shared<Arena>(segment, 0);
  Arena empty(segment, 0);
  segment.reset();
  void* first = arena->allocate(1000);
  void* second = arena->allocate(5000);
  empty.retire();
  arena->retire();
  check(!world.expired() && arena->contains(first), "two arrays");
  check(arena->allocate(8) == nullptr && empty.allocate(8) == nullptr, "no more come");
  std::memset(second, 7, 5000);
  arena->free(first);
  check(!world.expired() && static_cast<char*>(second)[4999] == 7, "one array");
  arena->free(second);
  check(world.expired(), "none");
  check(!arena->contains(second), "its place may be another mapping's");
  arena->after_fork_in_child();  // changes nothing there
  arena->retire();
  check_equal(arena->used(), std::size_t{0}, "used");
});

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }
