// The engine end to end, with ranks as threads: names, waits and arrays of uneven lengths. test_programs.cpp
// has results.
#include <sys/mman.h>

#include "ranks.hpp"

namespace kvstore_hvd {
namespace {

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
  constexpr int kThreads = 6, kTimes = 500;
  for (const int size : {2, 3}) {
    with_world(size, [size](Engine& engine, int rank) {
      testing::on_threads(kThreads, [&](int t) {
        // Two threads each have a name in common; one size is not carried out inline.
        const bool is_common = t < 4, is_large = t == 2 || t == 3 || t == 5;
        std::vector<float> data(is_large ? 5000 : 4), result(data.size());
        Request request = allreduce(std::to_string(is_common ? t / 2 : t), data);
        request.outputs = {result.data()};
        const auto shared = std::make_shared<Request>(std::move(request));
        std::shared_ptr<Work> work;
        for (int i = 0; i < kTimes; ++i) {
          data[0] = static_cast<float>(is_common ? rank : rank + i);
          if (work) {
            engine.submit_to_wait(work);
          } else {
            work = engine.submit_to_wait(shared);
          }
          if (!engine.wait_briefly(*work)) engine.wait(*work);
          check(work->status().ok(), work->status().text());
          check_equal(result[0], static_cast<float>(size * (size - 1) / 2 + (is_common ? 0 : size * i)), "sum");
        }
      });
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

// Of two ranks that announce at the same time, either may be counted first. ThreadSanitizer sees a description that is
// read while it is written.
const bool described = testing::add("what a rank has missed is described as the others have announced it", [] {
  constexpr int kSize = 3, kSteps = 5000;
  const auto segment = Segment::create(kSize);
  std::atomic<int> announced{0}, completed{0};
  testing::on_threads(kSize, [&](int rank) {
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
  });
});

Request exchange(const std::string& name, const std::vector<float>& input, std::vector<float>& output,
                 std::size_t count) {
  Request request = allreduce(name, output);
  request.collective = Collective::kExchange;
  request.inputs = {input.data()};
  request.count = count;
  request.shape = {static_cast<std::int64_t>(count)};
  request.contributed = input.size();
  return request;
}

// In a child: memory that cannot be read lies behind the array.
const bool short_arrays = testing::add("nothing is read behind an array that is shorter than the others'", [] {
  constexpr std::size_t kShort = 5000, kLong = 200000, kPage = 4096;
  constexpr std::size_t kBytes = (kShort * sizeof(float) + kPage - 1) / kPage * kPage;
  const bool is_right = succeeds_in_child([&] {
    auto* const pages =
        static_cast<char*>(mmap(nullptr, kBytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(pages + kBytes, kPage, PROT_NONE);
    with_world(2, [&](Engine& engine, int rank) {
      auto mine = values_of(rank, rank == 0 ? kShort : kLong);
      std::vector<float> output(kShort + kLong);
      Request request = exchange("x", mine, output, kLong);
      if (rank == 0) {
        request.inputs = {std::memcpy(pages + kBytes - kShort * sizeof(float), mine.data(), kShort * sizeof(float))};
      }
      request.parts = {Part{0, 0, kShort * sizeof(float), 0},
                       Part{1, 0, kLong * sizeof(float), kShort * sizeof(float)}};
      check(engine.run(std::move(request)).ok(), "run");
      check(same_bits(output, [=](std::size_t i) { return i < kShort ? value_of(0, i) : value_of(1, i - kShort); }),
            "the arrays, one after the other");
    });
    return testing::failures == 0;
  });
  check(is_right, "the child reads on");
});

}  // namespace
}  // namespace kvstore_hvd
