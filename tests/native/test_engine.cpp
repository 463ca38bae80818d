// The engine end to end, with ranks as threads: results, whatever the order of requests, and names, waits and
// callbacks.
#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <thread>

#include "check.hpp"
#include "ranks.hpp"
#include "reduce/reduce.hpp"

namespace kvstore_hvd {
namespace {

using testing::check;
using testing::check_equal;

const std::vector<int> kSizes{1, 2, 3, 4, 7};

void check_sums(const Thresholds& thresholds) {
  for (const int size : kSizes) {
    with_world(
        size,
        [&](Engine& engine, int rank) {
          for (const std::size_t count : {0, 1, 3, 15, 16, 17, 511, 512, 513, 16384, 100003, 1 << 20}) {
            auto data = values_of(rank, count);
            const Status status = engine.run(allreduce("t" + std::to_string(count), data));
            check(status.ok(), status.text());
            check(same_bits(data, [&](std::size_t i) { return sum_in_rank_order(size, i); }),
                  "wrong sum of " + std::to_string(count) + " at size " + std::to_string(size));
          }
        },
        std::chrono::seconds(60), 0, thresholds);
  }
}

const bool sums =
    testing::add("allreduce equals the rank-ordered sum bit by bit, at any size", [] { check_sums(Thresholds()); });

// The smallest go one of these ways in worlds of many ranks, or with other thresholds.
const bool scheduled_sums = testing::add("so does one that is scheduled, however small", [] {
  check_sums(parse_thresholds("inlined=0,one_shot=4096"));
  check_sums(parse_thresholds("inlined=0,one_shot=0"));
});

const bool every_type = testing::add("every dtype and op equals one reduction over all ranks' arrays", [] {
  constexpr std::size_t kCount = 5003;
  for (const int size : {2, 3, 4}) {
    // Bytes below 64 make no NaN in any of the types, and no overflow that is undefined.
    const auto bytes_of = [](int rank, DType dtype) {
      std::vector<unsigned char> bytes(kCount * size_of(dtype));
      for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = (i * 7 + static_cast<std::size_t>(rank) * 13) % 64;
      return bytes;
    };
    with_world(size, [&](Engine& engine, int rank) {
      for (int d = 0; d < kDTypes; ++d) {
        for (int o = 0; o < kReduceOps; ++o) {
          const auto dtype = static_cast<DType>(d);
          const auto op = static_cast<ReduceOp>(o);
          auto data = bytes_of(rank, dtype);
          Request request;
          request.name = std::string(name_of(dtype)) + name_of(op);
          request.inputs = {data.data()};
          request.outputs = {data.data()};
          request.count = kCount;
          request.shape = {kCount};
          request.dtype = dtype;
          request.op = op;
          const Status status = engine.run(std::move(request));
          check(status.ok(), status.text());

          std::vector<std::vector<unsigned char>> all;
          std::vector<const void*> inputs;
          for (int r = 0; r < size; ++r) all.push_back(bytes_of(r, dtype));
          for (const auto& one : all) inputs.push_back(one.data());
          std::vector<unsigned char> expected(data.size());
          const double postscale = op == ReduceOp::kAverage ? 1.0 / size : 1.0;
          reduce_over(placement_of(size), Reduction{dtype, op, 1.0, postscale}, inputs, expected.data(), kCount);
          check(data == expected, std::string("wrong ") + name_of(op) + " of " + name_of(dtype));
        }
      }
    });
  }
});

// One seeded run of many tensors, submitted by each rank in its own order, with its own delays and priorities.
void run_schedule(Engine& engine, int rank, int size, std::uint32_t seed, int tensors, std::size_t largest) {
  std::mt19937 common(seed), own(seed * 977 + static_cast<std::uint32_t>(rank));
  std::vector<std::vector<float>> data;
  for (int t = 0; t < tensors; ++t) {
    const std::size_t scale = std::size_t{1} << (common() % 18);
    data.push_back(values_of(rank, common() % std::min(scale, largest), seed + static_cast<std::uint32_t>(t)));
  }
  std::vector<int> order(data.size());
  for (int t = 0; t < tensors; ++t) order[t] = t;
  std::shuffle(order.begin(), order.end(), own);
  std::vector<std::shared_ptr<Work>> works(data.size());
  for (const int t : order) {
    if (own() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
    Request request = allreduce("t" + std::to_string(t), data[t], static_cast<int>(own() % 5));
    if (t % 7 == 3) {
      request.collective = Collective::kBroadcast;
      request.root = t % size;
    }
    works[t] = engine.submit(std::move(request));
  }
  std::shuffle(order.begin(), order.end(), own);
  for (const int t : order) {
    const Status& status = engine.wait(*works[t]);
    check(status.ok(), status.text());
    const std::uint32_t tensor_seed = seed + static_cast<std::uint32_t>(t);
    const bool right = same_bits(data[t], [&](std::size_t i) {
      return t % 7 == 3 ? value_of(t % size, i, tensor_seed) : sum_in_rank_order(size, i, tensor_seed);
    });
    check(right, "seed " + std::to_string(seed) + ": wrong bits in tensor " + std::to_string(t));
  }
}

const bool schedules =
    testing::add("1,000 seeded schedules give the same bits whatever the order, delay and priority", [] {
      const int runs = thread_sanitizer() ? 30 : 250;
      for (const int size : {1, 2, 3, 4}) {
        with_world(size, [&](Engine& engine, int rank) {
          for (int s = 0; s < runs; ++s) {
            run_schedule(engine, rank, size, static_cast<std::uint32_t>(s * 31 + size), 12, 60000);
          }
        });
      }
    });

const bool many_ranks = testing::add("64 ranks on few cores", [] {
  if (thread_sanitizer()) return;  // hundreds of threads take it minutes, and add no interleaving
  with_world(64, [&](Engine& engine, int rank) { run_schedule(engine, rank, 64, 1, 6, 5000); });
});

const bool devices =
    testing::add("contributions of several devices are summed once and fanned out to every output", [] {
      for (const int size : {1, 2, 4}) {
        with_world(size, [&](Engine& engine, int rank) {
          for (const std::size_t count : {5, 100000}) {
            auto first = values_of(rank, count, 1), second = values_of(rank, count, 2);
            std::vector<float> third(count);
            Request request = allreduce("devices" + std::to_string(count), first);
            request.inputs = {first.data(), second.data()};
            request.outputs = {first.data(), second.data(), third.data()};
            check(engine.run(std::move(request)).ok(), "run");
            const auto expected = [&](std::size_t i) {
              return sum_over(placement_of(size), [&](int r) { return value_of(r, i, 1) + value_of(r, i, 2); });
            };
            check(same_bits(first, expected) && same_bits(second, expected) && same_bits(third, expected),
                  "wrong bits");
          }
        });
      }
    });

const bool same_name = testing::add("requests under one name run one after another", [] {
  with_world(3, [&](Engine& engine, int rank) {
    std::vector<std::vector<float>> data(50, std::vector<float>(100));
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t i = 0; i < data.size(); ++i) {
      std::fill(data[i].begin(), data[i].end(), static_cast<float>(rank) + static_cast<float>(i) * 10);
      works.push_back(engine.submit(allreduce("same", data[i])));
    }
    for (std::size_t i = 0; i < data.size(); ++i) {
      check(engine.wait(*works[i]).ok(), "wait");
      check(data[i][0] == 3 + static_cast<float>(i) * 30, "request met another one of its name");
    }
  });
});

const bool many_names =
    testing::add("names beyond the table's slots take those of finished tensors, and wait when there is none", [] {
      if (thread_sanitizer()) return;  // the table's own test covers the hand-over
      with_world(2, [&](Engine& engine, int rank) {
        std::vector<std::vector<float>> data(9000, std::vector<float>(1));
        for (int round = 0; round < 3; ++round) {
          std::vector<std::shared_ptr<Work>> works;
          for (std::size_t i = 0; i < data.size(); ++i) {
            data[i][0] = static_cast<float>(i) + static_cast<float>(rank);
            works.push_back(engine.submit(allreduce("r" + std::to_string(round) + "n" + std::to_string(i), data[i])));
          }
          for (std::size_t i = 0; i < data.size(); ++i) {
            const Status& status = engine.wait(*works[i]);
            check(status.ok(), status.text());
            check(data[i][0] == 2 * static_cast<float>(i) + 1, "wrong sum");
          }
        }
      });
    });

const bool stale_handles = testing::add("a name whose slot was given away does not disturb the tensor that has it", [] {
  if (thread_sanitizer()) return;  // thousands of names
  with_world(2, [&](Engine& engine, int rank) {
    std::vector<float> nothing(1);
    for (int i = 0; i < 8192; ++i)
      check(engine.run(allreduce("n" + std::to_string(i), nothing)).ok(), "fill the table");
    // Takes the slot of n0, and stays under way because rank 1 comes later.
    std::vector<float> taker{1}, first{1};
    std::shared_ptr<Work> work;
    if (rank == 0) work = engine.submit(allreduce("taker", taker));
    check(engine.run(allreduce("n0", first)).ok(), "n0");
    if (rank == 1) work = engine.submit(allreduce("taker", taker));
    check(engine.wait(*work).ok() && taker[0] == 2 && first[0] == 2, "both are summed");
  });
});

const bool opposite_orders = testing::add("more names than slots, in opposite orders", [] {
  if (thread_sanitizer()) return;
  with_world(2, [&](Engine& engine, int rank) {
    constexpr int kNames = 9000;
    std::vector<std::vector<float>> data(kNames, std::vector<float>(1, 1.0F));
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < kNames; ++i) {
      const int name = rank == 0 ? i : kNames - 1 - i;
      works.push_back(engine.submit(allreduce("n" + std::to_string(name), data[name])));
    }
    for (const auto& work : works) check(engine.wait(*work).ok(), work->status().text());
  });
});

const bool bounded_waits = testing::add("a bounded wait returns although another rank does not come", [] {
  with_world(2, [&](Engine& engine, int rank) {
    auto data = values_of(rank, 10);
    if (rank == 0) {
      const auto work = engine.submit(allreduce("x", data));
      check(!engine.wait(*work, std::chrono::milliseconds(20)), "not done");
      check(barrier(engine).ok(), "barrier");
      check(engine.wait(*work).ok(), "done");
    } else {
      check(barrier(engine).ok(), "barrier");
      check(engine.run(allreduce("x", data)).ok(), "done");
    }
  });
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

const bool shared_driver = testing::add("several threads of one rank submit and wait at once", [] {
  with_world(2, [&](Engine& engine, int rank) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 50; ++i) {
          auto data = values_of(rank, 1000, static_cast<std::uint32_t>(t));
          check(engine.run(allreduce("thread" + std::to_string(t), data)).ok(), "run");
          check(same_bits(data, [&](std::size_t e) { return sum_in_rank_order(2, e, static_cast<std::uint32_t>(t)); }),
                "wrong bits");
        }
      });
    }
    for (auto& thread : threads) thread.join();
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

const bool reused_in_vain = testing::add("a handle that failed with its world fails again", [] {
  for (int round = 0; round < 10; ++round) {
    with_world(2, [round](Engine& engine, int rank) {
      std::vector<float> data(8);
      auto work = engine.submit_to_wait(std::make_shared<Request>(allreduce("x", data)));
      for (int i = 0; engine.wait(*work).ok(); ++i) {
        if (rank == 0 && i == 20 + round * 7) engine.abort("now");
        engine.submit_to_wait(work);
      }
      engine.submit_to_wait(work);
      check(engine.wait(*work).code() == ErrorCode::kTransport, "latched");
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

      std::fill(values.begin(), values.end(), 1.0F);
      request = allreduce("x", values);
      request.op = ReduceOp::kAverage;
      request.weight = Request::kAbsent;
      check(engine.run(std::move(request)).ok(), "it is reduced");
      check(same_bits(values, [](std::size_t) { return 4.0F; }), "nobody counts: a sum");
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

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }
