// The engine end to end, with ranks as threads: names, waits and callbacks. test_programs.cpp has sums.
#include <atomic>
#include <random>
#include <string>
#include <thread>

#include "check.hpp"
#include "ranks.hpp"

namespace kvstore_hvd {
namespace {

using testing::check;
using testing::check_equal;

const bool opposite_orders = testing::add("more names than slots, in opposite orders", [] {
  if (thread_sanitizer()) return;
  with_world(2, [&](Engine& engine, int rank) {
    constexpr int kNames = 9000;
    for (int round = 0; round < 2; ++round) {
      std::vector<std::vector<float>> data(kNames);
      std::vector<std::shared_ptr<Work>> works;
      for (int i = 0; i < kNames; ++i) {
        const int name = rank == 0 ? i : kNames - 1 - i;
        data[name] = {static_cast<float>(name + rank)};
        works.push_back(engine.submit(allreduce("n" + std::to_string(name), data[name])));
      }
      for (const auto& work : works) check(engine.wait(*work).ok(), work->status().text());
      for (int i = 0; i < kNames; ++i) check(data[i][0] == static_cast<float>(2 * i + 1), "wrong sum");
    }
  });
});

// A wake-up that is missed costs a sleep, and nothing fails.
const bool awake = testing::add("no sleep ends by its limit while there is something to do", [] {
  if (thread_sanitizer()) return;  // so slow a rank may be about to wake a sleeper whose limit passes
  for (const int size : {2, 4}) {
    const std::uint64_t before = missed_wakes.load();
    with_world(size, [](Engine& engine, int rank) {
      std::mt19937 own(static_cast<unsigned>(rank));
      const auto pause = [&] { std::this_thread::sleep_for(std::chrono::microseconds(own() % 400)); };
      for (std::size_t round = 0; round < 100; ++round) {
        std::vector<std::vector<float>> data;
        for (const std::size_t count : {1, 600, 20000, 400000}) data.push_back(values_of(rank, count));
        std::vector<std::shared_ptr<Work>> works;
        for (std::size_t i = 0; i < data.size(); ++i) {
          pause();
          works.push_back(engine.submit(allreduce("t" + std::to_string(i), data[(i + round) % data.size()])));
        }
        for (const auto& work : works) {
          pause();
          check(engine.wait(*work).ok(), work->status().text());
        }
        auto last = values_of(rank, 3);
        check(engine.run(allreduce("last", last)).ok(), "the last one");
      }
      // One rank comes when the others have been asleep for long.
      for (int round = 0; round < 20; ++round) {
        auto data = values_of(rank, 20000);
        if (round % engine.size() == rank) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        check(engine.run(allreduce("late", data)).ok(), "a late one");
      }
    });
    check_equal(missed_wakes.load(), before, "wake-ups that were missed");
  }
});

// While a callback holds up the thread that makes progress, the tensors gather, and travel together.
const bool fused_devices = testing::add("arrays of two devices of a rank are added, also where tensors are fused", [] {
  std::atomic<int> submitted{0};
  const auto body = [&](Engine& engine, int rank) {
    std::vector<float> gate(100);
    Request first = allreduce("gate", gate);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    first.on_done = [&submitted, limit](const Status&) {
      while (submitted < 2 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    };
    std::vector<std::vector<float>> one(20), other(20);
    std::vector<std::shared_ptr<Work>> works{engine.submit(std::move(first))};
    for (std::uint32_t t = 0; t < one.size(); ++t) {
      one[t] = values_of(rank, 100, t);
      other[t].assign(100, static_cast<float>(t));
      Request request = allreduce("t" + std::to_string(t), one[t]);
      request.inputs.push_back(other[t].data());
      request.outputs.push_back(other[t].data());
      works.push_back(engine.submit(std::move(request)));
    }
    ++submitted;
    for (const auto& work : works) check(engine.wait(*work).ok(), work->status().text());
    for (std::uint32_t t = 0; t < one.size(); ++t) {
      const auto local = [t](int r, std::size_t i) { return value_of(r, i, t) + static_cast<float>(t); };
      const auto sum = [&](std::size_t i) { return local(0, i) + local(1, i); };
      check(same_bits(one[t], sum) && same_bits(other[t], sum), "tensor " + std::to_string(t));
    }
  };
  with_world(2, body, std::chrono::seconds(60), 0, parse_thresholds("inlined=0"));
});

const bool callbacks = testing::add("on_done is called exactly once, also for what fails", [] {
  with_world(2, [&](Engine& engine, int rank) {
    std::atomic<int> calls{0};
    std::vector<std::vector<float>> data(20, std::vector<float>(10));
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 20; ++i) {
      // Rank 1 leaves half of them out.
      if (rank == 1 && i >= 10) break;
      Request request = allreduce("c" + std::to_string(i), data[i]);
      request.on_done = [&](const Status&) { ++calls; };
      works.push_back(engine.submit(std::move(request)));
    }
    for (int i = 0; i < 10; ++i) check(engine.wait(*works[i]).ok(), "those of both ranks succeed");
    static_cast<void>(barrier(engine));
    engine.abort("enough");
    for (const auto& work : works) engine.wait(*work);
    check(calls == static_cast<int>(works.size()), "calls: " + std::to_string(calls));
  });
});

const bool one_name = testing::add("several threads of one rank wait for operations of one name", [] {
  with_world(2, [&](Engine& engine, int rank) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 1000; ++i) {
          auto data = values_of(rank, 4096);
          check(engine.run(allreduce("x", data)).ok(), "run");
          check(same_bits(data, [](std::size_t e) { return sum_in_rank_order(2, e); }), "wrong bits");
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
});

const bool late_waiter =
    testing::add("who waits for an operation that another thread completes leaves the next of its name alone", [] {
      with_world(2, [&](Engine& engine, int rank) {
        // The first one is scheduled, the second one carried by the announcements.
        auto first = values_of(rank, 4096), second = values_of(rank, 16);
        std::vector<float> sum(second.size());
        Request small = allreduce("x", second);
        small.outputs = {sum.data()};
        if (rank == 0) {
          std::atomic<bool> completing{false}, go_on{false};
          std::atomic<int> calls{0};
          Request large = allreduce("x", first);
          large.on_done = [&](const Status&) {
            ++calls;
            completing = true;
            while (!go_on) std::this_thread::yield();
          };
          const auto watched = engine.submit_to_wait(std::make_shared<Request>(std::move(large)));
          const auto next = engine.submit(std::move(small));
          while (!completing) std::this_thread::yield();
          // By now the next one is announced, and the watched one not yet done.
          engine.wait(*watched, std::chrono::milliseconds(1));
          check(!next->done(), "done without the other rank");
          go_on = true;
          check(engine.wait(*watched).ok(), "the first one");
          check(barrier(engine).ok(), "barrier");
          check(engine.wait(*next).ok(), "the next one");
          check_equal(calls.load(), 1, "calls of on_done");
        } else {
          check(engine.run(allreduce("x", first)).ok(), "the first one");
          check(barrier(engine).ok(), "barrier");
          check(engine.run(std::move(small)).ok(), "the next one");
        }
        check(same_bits(sum, [](std::size_t i) { return sum_in_rank_order(2, i); }), "wrong bits");
      });
    });

const bool reused = testing::add("a handle that is over is submitted again, by many threads at once", [] {
  constexpr int kThreads = 4, kTimes = 500;
  for (const int size : {2, 3}) {
    with_world(size, [size](Engine& engine, int rank) {
      std::vector<std::thread> threads;
      for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
          // Two threads have a name in common; one size is not carried out inline.
          std::vector<float> data(t == 3 ? 5000 : 4), result(data.size());
          Request request = allreduce(t < 2 ? "common" : "own" + std::to_string(t), data);
          request.outputs = {result.data()};
          const auto shared = std::make_shared<Request>(std::move(request));
          std::shared_ptr<Work> work;
          for (int i = 0; i < kTimes; ++i) {
            data[0] = static_cast<float>(t < 2 ? rank : rank + i);
            if (work) {
              engine.submit_to_wait(work);
            } else {
              work = engine.submit_to_wait(shared);
            }
            if (!engine.wait_briefly(*work)) engine.wait(*work);
            check(work->status().ok(), work->status().text());
            check_equal(result[0], static_cast<float>(size * (size - 1) / 2 + (t < 2 ? 0 : size * i)), "sum");
          }
        });
      }
      for (auto& thread : threads) thread.join();
    });
  }
});

const bool absent = testing::add("an absent rank counts as an average one of the others", [] {
  for (const std::size_t count : {3, 40000}) {
    with_world(4, [&](Engine& engine, int rank) {
      std::vector<float> values(count, rank < 3 ? 12.0F : 0.0F);
      Request request = allreduce("x", values);
      request.op = ReduceOp::kAverage;
      request.weight = rank == 0 ? 8.0 : rank == 1 ? 4.0 : rank == 2 ? 0.0 : Request::kAbsent;
      check(engine.run(std::move(request)).ok(), "it is reduced");
      // Two ranks with 12 samples, so three would have had 18.
      check(same_bits(values, [](std::size_t) { return 2.0F; }), "36 by 18");
    });
  }
});

const bool weighted = testing::add("an average is divided by the ranks' weights, whichever way it goes", [] {
  for (const int size : {2, 3, 4}) {
    with_world(size, [size](Engine& engine, int rank) {
      // Of all ranks; of one of them; all zero: then it is the sum.
      for (const int kind : {0, 1, 2}) {
        const auto weight_of = [&](int r) { return kind == 0 ? 0.5 + r : kind == 1 && r == size - 1 ? 3.0 : 0.0; };
        double weights = 0.0;
        for (int r = 0; r < size; ++r) weights += weight_of(r);
        for (const std::size_t count : {1, 100, 5000, 300000}) {
          auto data = values_of(rank, count);
          Request request = allreduce("k" + std::to_string(kind) + "c" + std::to_string(count), data);
          request.op = ReduceOp::kAverage;
          request.weight = weight_of(rank);
          check(engine.run(std::move(request)).ok(), "run");
          const auto scale = static_cast<float>(weights == 0.0 ? 1.0 : 1.0 / weights);
          check(same_bits(data, [&](std::size_t i) { return sum_in_rank_order(size, i) * scale; }),
                "kind " + std::to_string(kind) + " of " + std::to_string(count));
        }
      }
      std::vector<float> data(1);
      Request request = allreduce("negative", data);
      request.weight = -2.0;
      check(engine.run(std::move(request)).code() == ErrorCode::kInputFailed, "a weight below 0");
    });
  }
});

// Of two ranks that announce at the same time, either may be counted first. ThreadSanitizer sees a description that is
// read while it is written.
const bool described = testing::add("what a rank has missed is described as the others have announced it", [] {
  constexpr int kSize = 3, kSteps = 5000;
  const auto segment = Segment::create(kSize);
  std::atomic<int> announced{0}, completed{0};
  const auto run_rank = [&](int rank) {
    Alarm alarm(segment->world(), rank, std::chrono::seconds(60));
    TensorTable table(segment->world(), alarm);
    const SlotHandle handle = *table.find("t");
    const auto wait_for_all = [](std::atomic<int>& count, int step) {
      ++count;
      while (count < kSize * (step + 1)) std::this_thread::yield();
    };
    for (int step = 0; step < kSteps; ++step) {
      auto data = values_of(rank, 2000 + static_cast<std::size_t>(step % 5));
      std::optional<std::vector<Missed>> missed;
      while (rank == 2 && (!missed || missed->empty())) missed = table.missed(1, true);
      if (rank == 2) check(missed->front().announced->count == data.size(), "another description");
      static_cast<void>(table.announce(handle, allreduce("t", data)));
      wait_for_all(announced, step);
      table.complete(handle.slot);
      wait_for_all(completed, step);
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) threads.emplace_back(run_rank, rank);
  for (auto& thread : threads) thread.join();
});

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }
