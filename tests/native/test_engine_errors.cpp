// What the engine says, and to whom, when ranks disagree, fail, leave, or do not come, and what is left of a world that
// a rank has left; ranks are threads.
#include <cmath>
#include <memory>

#include "ranks.hpp"
#include "shm/arena.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

const bool mismatches =
    testing::add("a disagreement fails that operation on every rank, changes nothing, and the world goes on", [] {
      struct Case {
        const char* text;
        std::function<void(Request&)> change;
      };
      const std::vector<Case> cases{
          {"ranks disagree on shape.\n  (64,): ranks 0-1, 3    (8, 8): rank 2\n  Nothing was changed. "
           "Fix: pass an array of the same shape on every rank.",
           [](Request& r) { r.shape = {8, 8}; }},
          {"ranks disagree on operation.\n  allreduce: ranks 0-1, 3    broadcast: rank 2",
           [](Request& r) { r.collective = Collective::kBroadcast; }},
          {"ranks disagree on reduce op.\n  sum: ranks 0-1, 3    max: rank 2\n",
           [](Request& r) { r.op = ReduceOp::kMax; }},
          {"ranks disagree on gradient compression.\n  none: ranks 0-1, 3    fp16: rank 2\n  Nothing was changed. "
           "Fix: call set_gradient_compression with the same type on every rank.",
           [](Request& r) { r.as_half = true; }},
          {"ranks disagree on the kind of memory.\n  CPU: ranks 0-1, 3    GPU: rank 2\n",
           [](Request& r) { r.on_device = true; }},
          {"ranks disagree on prescale.\n  1: ranks 0-1, 3    0.5: rank 2\n", [](Request& r) { r.prescale = 0.5; }},
          {"ranks disagree on prescale.\n  1: ranks 0-1, 3    0.99999999999999989: rank 2\n",
           [](Request& r) { r.prescale = std::nextafter(1.0, 0.0); }},
          {"ranks disagree on postscale.\n  1: ranks 0-1, 3    0.5: rank 2\n", [](Request& r) { r.postscale = 0.5; }},
          {"ranks disagree on the other arrays of the group.\n  group 0: ranks 0-1, 3    group 8: rank 2\n",
           [](Request& r) { r.group = 8; }},
      };
      with_world(4, [&](Engine& engine, int rank) {
        for (const Case& one : cases) {
          auto data = values_of(rank, 64);
          Request request = allreduce("tensor", data);
          if (rank == 2) one.change(request);
          const Status status = engine.run(std::move(request));
          check(status.code() == ErrorCode::kMismatch, "no mismatch: " + status.text());
          const std::string operation = rank == 2 && contains(one.text, "operation") ? "broadcast" : "allreduce";
          check(status.text().rfind("[rank " + std::to_string(rank) + "/4] " + operation + " 'tensor': " + one.text,
                                    0) == 0,
                status.text());
          check(same_bits(data, [&](std::size_t i) { return value_of(rank, i); }), "an array was changed");
        }
        auto data = values_of(rank, 64);
        Request parameter = allreduce("tensor", data);
        parameter.label = "'dense0_weight' (key 3)";
        if (rank == 2) parameter.shape = {8, 8};
        const Status of_network = engine.run(std::move(parameter));
        check(contains(of_network.text(), "Fix: build the same network on every rank."), of_network.text());
        check(engine.run(allreduce("tensor", data)).ok(), "the name works again");
        check(engine.health().ok(), "the world is healthy");
        auto other = values_of(rank, 32);
        check(engine.run(allreduce("tensor", other)).ok(), "a new shape is fine when all ranks have it");
      });
    });

const bool invalid = testing::add("wrong requests fail, and nobody waits for them", [] {
  with_world(1, [&](Engine& engine, int) {
    auto data = values_of(0, 3);
    for (const std::size_t bytes : {0, 1, 240, 241}) {
      const bool is_valid = 0 < bytes && bytes < 241;
      const Status status = engine.run(allreduce(std::string(bytes, 'x'), data));
      check(status.code() == (is_valid ? ErrorCode::kOk : ErrorCode::kInvalid), "a name: " + status.text());
    }
    constexpr auto kReduce = Collective::kAllreduce, kCopy = Collective::kBroadcast, kTake = Collective::kExchange;
    const std::tuple<const char*, Collective, std::function<void(Request&)>> wrong[] = {
        {"foreign root", kCopy, [](Request& r) { r.root = 1; }},
        {"two inputs", kCopy, [](Request& r) { r.inputs.push_back(r.inputs[0]); }},
        {"no input", kReduce, [](Request& r) { r.inputs.clear(); }},
        {"no output", kReduce, [](Request& r) { r.outputs.clear(); }},
        {"a weight below 0", kReduce, [](Request& r) { r.weight = -2.0; }},
        {"no number", kReduce, [](Request& r) { r.weight = std::nan(""); }},
        {"an infinite weight", kReduce, [](Request& r) { r.weight = HUGE_VAL; }},
        {"no parts", Collective::kReduceScatter, [](Request& r) { r.parts.clear(); }},
        {"two outputs", kTake, [](Request& r) { r.outputs.push_back(r.outputs[0]); }},
        {"more than the most", kTake, [](Request& r) { r.contributed = 4; }},
        {"a part of no rank", kTake, [](Request& r) { r.parts = {Part{-1, 0, 4, 0}}; }},
        {"a part of a rank that is not there", kTake, [](Request& r) { r.parts = {Part{1, 0, 4, 0}}; }},
        {"a part behind the end", kTake, [](Request& r) { r.parts = {Part{0, 16, 4, 0}}; }},
        {"a part that ends in an element", kTake, [](Request& r) { r.parts = {Part{0, 0, 6, 0}}; }},
    };
    for (const auto& [what, collective, change] : wrong) {
      Request request = allreduce("x", data);
      request.collective = collective;
      change(request);
      check(engine.run(std::move(request)).code() == ErrorCode::kInputFailed, what);
    }
  });
});

const bool first_failure = testing::add("what failed a world first stays its failure, whoever finds what later", [] {
  const auto segment = Segment::create(2);
  Failure& failure = segment->world().failure;
  check(failure.set(1, ErrorCode::kTimeout, "the first") && failure.is_set(), "set");
  for (const int rank : {0, 1}) check(!failure.set(rank, ErrorCode::kPeerLost, "a later one"), "too late");
  check(failure.code() == ErrorCode::kTimeout && failure.fact() == "the first", "as it was: " + failure.fact());
});

const bool leaving = testing::add("a rank that left is named by those who still need it, and by nobody else", [] {
  with_world(4, [&](Engine& engine, int rank) {
    check(barrier(engine).ok(), "the barrier");
    auto pending = values_of(rank, 10), data = values_of(rank, 10);
    if (rank != 3) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const auto work = engine.submit(allreduce("pending", pending));
    if (rank == 3) engine.shutdown();
    check(engine.wait(*work).ok(), "what it has submitted is completed: " + work->status().text());
    if (rank == 3) return;
    while (rank == 2 && engine.health().ok()) std::this_thread::yield();  // it may share the leaver's host
    const Status status = engine.run(allreduce("gone", data));
    check(status.code() == ErrorCode::kPeerLost, status.text());
    const std::string leaver = "rank 3 (testhost, pid " + std::to_string(getpid()) + ") ended its program";
    check(contains(status.text(), leaver), status.text());
    check(contains(status.text(), " is waiting in allreduce 'gone'"), status.text());
  });
});

const bool completed = testing::add("what one rank has completed when it ends the world is complete on all ranks", [] {
  struct Case {
    const char* name;
    std::size_t count;
    std::function<void(Request&, int)> change;
    ErrorCode code;
    bool in_arena = false;
  };
  const auto nothing = [](Request&, int) {};
  const std::vector<Case> cases{
      {"inline", 1, nothing, ErrorCode::kOk},
      {"one-shot", 6000, nothing, ErrorCode::kOk},
      {"two-shot", 100000, nothing, ErrorCode::kOk},
      {"broadcast", 6000, [](Request& r, int) { r.collective = Collective::kBroadcast; }, ErrorCode::kOk},
      {"inline in arenas", 6000, nothing, ErrorCode::kOk, true},
      {"direct", 100000, nothing, ErrorCode::kOk, true},
      {"mismatch", 16, [](Request& r, int rank) { r.prescale = rank; }, ErrorCode::kMismatch},
  };
  Thresholds thresholds;
  thresholds.inlined = 4096;
  thresholds.one_shot = 64 << 10;
  for (const int size : {2, 3, 4}) {
    for (int round = 0; round < (thread_sanitizer() ? 3 : 20); ++round) {
      for (const Case& one : cases) {
        const auto body = [&](Engine& engine, int rank) {
          auto data = values_of(rank, one.count);
          Request request = allreduce("last", data);
          Arena arena(engine.segment(), engine.local_rank());
          auto* shared = static_cast<float*>(arena.allocate(one.count * sizeof(float)));
          if (one.in_arena) {
            std::copy(data.begin(), data.end(), shared);
            request.inputs = {shared};
            request.outputs = {shared};
          }
          one.change(request, rank);
          // Callers that wait, and others.
          const auto work = (round + rank) % 2 == 0 ? engine.submit(request)
                                                    : engine.submit_to_wait(std::make_shared<Request>(request));
          const Status status = engine.wait(*work);
          if (rank == round % size) engine.shutdown("the user starts over");
          check(status.code() == one.code, std::string(one.name) + ": " + status.text());
          check_equal(engine.bytes_in_place(), one.in_arena ? 4 * one.count : 0U, std::string(one.name) + " in place");
          if (one.code != ErrorCode::kOk) return;
          if (one.in_arena) std::copy_n(shared, one.count, data.begin());
          check(same_bits(data,
                          [&](std::size_t i) {
                            return request.collective == Collective::kBroadcast ? value_of(0, i)
                                                                                : sum_in_rank_order(size, i);
                          }),
                one.name);
        };
        with_world(size, body, std::chrono::seconds(60), 1 << 20, thresholds);
      }
    }
  }
});

const bool sets = testing::add("messages of a process set name it, and its ranks by those among all", [] {
  with_world(
      3,
      [&](Engine& engine, int rank) {
        const std::string who[] = {"[rank 0/9, process set 7] ", "[rank 4/9, rank 1/3 in process set 7] ",
                                   "[rank 5/9, rank 2/3 in process set 7] "};
        auto data = values_of(rank, 9);
        Request request = allreduce("b", data);
        request.collective = Collective::kBroadcast;
        request.root = rank == 2 ? 2 : 1;
        Status status = engine.run(std::move(request));
        const std::string roots = "broadcast 'b': ranks disagree on root.\n  4: ranks 0, 4    5: rank 5";
        check(status.text().rfind(who[rank] + roots, 0) == 0, status.text());
        Request failed = allreduce("f", data);
        if (rank > 0) failed.input_failure = "it failed";
        status = engine.run(std::move(failed));
        check(contains(status.text(), "\n  rank 4: it failed\n  rank 5: it failed\n"), status.text());
        if (rank == 1) {
          while (engine.health().ok()) std::this_thread::yield();
          return;
        }
        status = engine.run(allreduce("late", data));
        check(status.code() == ErrorCode::kTimeout, status.text());
        check(status.text().rfind(who[rank], 0) == 0 && contains(status.text(), "for rank 4 (testhost, pid ") &&
                  contains(status.text(), "), which did not submit it."),
              status.text());
        check(engine.process(2).text.rfind("rank 5 (testhost", 0) == 0, engine.process(2).text);
      },
      std::chrono::seconds(2), 0, {}, Inside{7, 9, {0, 4, 5}});
});

const bool queued_deadlines = testing::add("a request that queues behind others of its name has its own deadline", [] {
  with_world(
      2,
      [&](Engine& engine, int rank) {
        std::vector<std::vector<float>> data(8, std::vector<float>(1));
        std::vector<std::shared_ptr<Work>> works;
        for (auto& one : data) {
          if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
          works.push_back(engine.submit(allreduce("same", one)));
        }
        for (const auto& work : works) check(engine.wait(*work).ok(), work->status().text());
      },
      std::chrono::milliseconds(2000));
});

const bool many_dimensions = testing::add("shapes are compared beyond the dimensions that are printed", [] {
  with_world(2, [&](Engine& engine, int rank) {
    auto data = values_of(rank, 6);
    for (const std::size_t first : {12, 18}) {
      Request request = allreduce("x", data);
      request.shape.assign(20, 1);
      request.shape[first] = rank == 0 ? 2 : 3;
      request.shape[first + 1] = rank == 0 ? 3 : 2;
      check(engine.run(std::move(request)).code() == ErrorCode::kMismatch, "different shapes");
    }
  });
});

const bool unfinished = testing::add("a rank that cannot finish its work leaves with an error for everybody", [] {
  with_world(
      2,
      [&](Engine& engine, int rank) {
        auto data = values_of(rank, 10);
        if (rank == 1) {
          const auto work = engine.submit(allreduce("alone", data));
          engine.shutdown();
          check(work->done() && work->status().latches(), "failed");
          check(engine.health().latches(), "it stays lost");
        } else {
          while (engine.health().ok()) std::this_thread::yield();
        }
      },
      std::chrono::seconds(2));
});

const bool letters = testing::add("a text that is too long is cut between two letters", [] {
  const std::string_view text = "a\u20ac\u20ac";  // of one byte, and of three
  for (std::size_t bytes = 0; bytes <= 8; ++bytes) {
    const std::size_t whole = bytes < 1 ? 0 : bytes < 4 ? 1 : bytes < 7 ? 4 : 7;
    check_equal(utf8_prefix(text, bytes).size(), whole, std::to_string(bytes));
  }
});

const bool under_way = testing::add("calls that are under way while a rank leaves, or come afterwards", [] {
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
          static_cast<void>(engine.report());
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
    testing::on_threads(4, [&](int i) {
      engines[static_cast<std::size_t>(i / 2)]->shutdown(i % 2 != 0 && round % 3 == 0 ? "the test says so" : "");
    });
    stop.store(true);
    for (auto& thread : threads) thread.join();
    check(world.expired(), "nobody has the segment");
    for (const auto& engine : engines) {
      std::vector<float> data(10);
      const auto work = engine->submit(allreduce("x", data));
      engine->submit_to_wait(work);
      const auto lingering = engine->submit_and_linger(allreduce("x", data));
      for (const Status& status : {engine->run(allreduce("x", data)), engine->wait(*work), lingering->status()}) {
        check(status.code() == ErrorCode::kShutdown && contains(status.text(), "'x': this rank has shut down."),
              status.text());
      }
      check(engine->wait_for_all(std::chrono::seconds(0)), "nothing is pending");
    }
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
