// What a rank waits for and what it has missed, as the stall report asks; ranks are threads.
#include <unistd.h>

#include "base/process.hpp"
#include "engine/pending.hpp"
#include "engine/schedule.hpp"
#include "engine/tensor_table.hpp"
#include "ranks.hpp"
#include "shm/wait.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

constexpr std::size_t kMost = 64;

// Asks until the condition holds; what a rank does is seen by another one a little later.
bool until(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

std::vector<Waiting> waiting(Engine& engine, std::chrono::nanoseconds age = {}) {
  std::optional<std::vector<Waiting>> all;
  check(until([&] { return (all = engine.waiting(age)).has_value(); }), "the engine's lock stays taken");
  return all.value_or(std::vector<Waiting>{});
}

// The names of the operations that the rank of `table` has missed.
template <class Table>
std::vector<std::string> missed_names(const Table& table, std::size_t most = kMost) {
  std::optional<std::vector<Missed>> all;
  check(until([&] { return (all = table.missed(most)).has_value(); }), "the table's lock stays taken");
  std::vector<std::string> names;
  for (const Missed& one : all.value_or(std::vector<Missed>{})) names.push_back(one.name);
  std::sort(names.begin(), names.end());
  return names;
}

const bool late_rank = testing::add("who waits names the late ranks, and a late rank names what it has missed", [] {
  std::atomic<int> looked{0}, saw_both{0};
  with_world(4, [&](Engine& engine, int rank) {
    check(barrier(engine).ok(), "all have joined");
    auto first = values_of(rank, 100), second = values_of(rank, 50000), third = values_of(rank, 100);
    std::vector<std::shared_ptr<Work>> works;
    if (rank == 2) works.push_back(engine.submit(allreduce("third", third)));
    const auto submit = [&] {
      works.push_back(engine.submit(allreduce("first", first)));
      works.push_back(engine.submit(allreduce("second", second)));
    };
    if (rank != 2) {
      if (rank == 3) check(until([&] { return saw_both.load() == 2; }), "rank 3 is late, too");
      works.push_back(engine.submit(allreduce("third", third)));
      submit();
      std::vector<Waiting> all;
      const auto wait_for = [&](const std::vector<int>& late, std::size_t n) {
        all = waiting(engine);
        const auto is_late = [&](const Waiting& one) {
          return one.blamed.ranks == (one.name == "third" ? std::vector<int>{3} : late);
        };
        return all.size() == n && std::all_of(all.begin(), all.end(), is_late);
      };
      if (rank < 2)
        check(until([&] { return wait_for({2, 3}, 3); }), "both wait for ranks 2 and 3, one for rank 3 only");
      saw_both.fetch_add(1);
      check(until([&] { return wait_for({2}, 2); }), "both wait for rank 2 only");
      for (const Waiting& one : all) {
        check(!one.blamed.announced_by_all, "rank 2 has not announced it");
        check_equal(one.operation, "allreduce '" + one.name + "'", "what is waited for");
        check(one.since <= std::chrono::steady_clock::now(), "since when");
      }
      check(waiting(engine, std::chrono::hours(1)).empty(), "nothing has waited for an hour");
      check(missed_names(engine).empty(), "nobody waits for this rank");
    } else {
      check(until([&] { return missed_names(engine) == std::vector<std::string>{"first", "second"}; }), "missed");
      check(until([&] { return waiting(engine).empty(); }), "this rank waits for nothing, once rank 3 is there");
      check_equal(missed_names(engine, 1).size(), std::size_t{1}, "as many as are wanted");
    }
    looked.fetch_add(1);
    check(until([&] { return looked.load() == 4; }), "all have looked");
    if (rank == 2) submit();
    for (const auto& work : works) check(engine.wait(*work).ok(), work->status().text());
    check(barrier(engine).ok(), "all are done");
    check(missed_names(engine).empty() && waiting(engine).empty(), "it is over");
  });
});

const bool late_on_both_hosts = testing::add("ranks of all hosts are late, though no host is complete", [] {
  std::atomic<int> seen{0};
  with_hosts({{0, 1}, {2, 3}}, [&](Engine& engine, int rank) {
    check(barrier(engine).ok(), "all have joined");
    auto values = values_of(rank, 100);
    if (rank == 1 || rank == 2) check(until([&] { return seen.load() == 2; }), "they come late");
    const auto work = engine.submit(allreduce("x", values));
    if (rank == 0 || rank == 3) {
      check(until([&] {
              missed_names(engine);  // asks
              const auto all = waiting(engine);
              return all.size() == 1 && all[0].blamed.ranks == std::vector<int>{1, 2};
            }),
            "both are named on both hosts");
      seen.fetch_add(1);
    }
    check(engine.wait(*work).ok(), work->status().text());
  });
});

void do_more_afterwards(const Placement& placement, int rounds) {
  with_hosts(placement, [&](Engine& engine, int rank) {
    for (int round = 0; round < rounds; ++round) {
      auto token = values_of(rank, 1), after = values_of(rank, 1);
      const auto work = engine.submit(allreduce("~left", token));
      if (rank == 0) {
        while (true) {
          const auto missed = engine.missed(kMost, true);
          const bool is_met = engine.is_met(*work);
          check(is_met || !missed || missed->empty(), "missed in time");
          if (is_met) break;
        }
      } else {
        check(engine.wait(*work).ok(), "it is over");
      }
      check(engine.run(allreduce("after", after)).ok(), "the next one");
      check(engine.wait(*work).ok(), "it is over here, too");
    }
  });
}

const bool met = testing::add("what a rank does after an operation is not missed before that one is met", [] {
  do_more_afterwards({{0, 1, 2}}, thread_sanitizer() ? 200 : 2000);
  do_more_afterwards({{0}, {1, 2}, {3}}, 200);
});

// A rank whose operations are announced, and never carried out: it stands still inside the collective.
class Ghost {
 public:
  Ghost(Segment& segment, int rank)
      : world_(segment.world()), alarm_(world_, rank, std::chrono::seconds(60)), table_(world_, alarm_) {}
  void announce(const Request& request) {
    const auto handle = table_.find(request.name);
    if (table_.announce(*handle, request) == TensorTable::Outcome::kLast) {
      Schedule(world_, alarm_).make_ready(handle->slot, 0);
      ring_all(world_);
    }
  }
  std::optional<std::vector<Missed>> missed(std::size_t most) const { return table_.missed(most, false); }

 private:
  World& world_;
  Alarm alarm_;
  TensorTable table_;
};

const bool many = testing::add("a late rank of a world of more than 64 is named", [] {
  const auto segment = Segment::create(66);
  Engine engine(segment, 0, thread_options());
  auto data = values_of(0, 10);
  static_cast<void>(engine.submit(allreduce("x", data)));
  for (int rank = 1; rank < 65; ++rank) Ghost(*segment, rank).announce(allreduce("x", data));
  const auto all = waiting(engine);
  check(all.size() == 1 && all[0].blamed.ranks == std::vector<int>{65}, "rank 65 is late");
  engine.abort("the test is over");
});

const bool patient = testing::add("a patient operation is told to who asks, and nobody misses it", [] {
  const auto segment = Segment::create(2);
  Ghost ghost(*segment, 1);
  Engine engine(segment, 0, thread_options());
  auto token = values_of(0, 1);
  static_cast<void>(engine.submit(allreduce("~left", token)));
  const auto all = waiting(engine);
  check(all.size() == 1 && all[0].name == "~left", "who asks is told");
  check(missed_names(ghost).empty(), "nor is it missed");
  engine.abort("the test is over");
});

const bool inside = testing::add("a rank that stops inside the collective is the one to blame", [] {
  const auto segment = Segment::create(2);
  Ghost ghost(*segment, 1);
  Engine engine(segment, 0, thread_options(std::chrono::seconds(2), true));  // it does not compute
  auto data = values_of(0, 50000), ghosts = values_of(1, 50000);
  const auto work = engine.submit(allreduce("large", data));
  check_equal(missed_names(ghost).size(), std::size_t{1}, "missed before");
  ghost.announce(allreduce("large", ghosts));
  check(missed_names(ghost).empty(), "announced by all: nobody has missed it");
  check(until([&] {
          const auto all = waiting(engine);
          return all.size() == 1 && all[0].blamed.announced_by_all && all[0].blamed.ranks == std::vector<int>{1};
        }),
        "rank 1 is behind");
  segment->world().rank(1).filled.post(100);
  check(until([&] { return segment->world().rank(0).reduced.value() > 0; }), "rank 0 goes on");
  check(waiting(engine)[0].blamed.ranks == std::vector<int>{1}, "rank 1 has not reduced anything");
  if (!engine.wait(*work, std::chrono::seconds(30))) engine.abort("the test is over");
  check(engine.wait(*work).code() == ErrorCode::kTimeout, work->status().text());
  check(waiting(engine).empty(), "a lost world has nobody who waits");
  check(missed_names(engine).empty(), "nor who is late");
});

const bool no_slot = testing::add("an operation for which others leave no slot fails at the timeout", [] {
  const auto segment = Segment::create(2);
  Ghost ghost(*segment, 1);
  Engine engine(segment, 0, thread_options(std::chrono::seconds(1)));
  auto data = values_of(0, 10);
  for (int i = 0; i < kSlots; ++i) ghost.announce(allreduce("t" + std::to_string(i), data));
  const auto work = engine.submit(allreduce("one too many", data));
  const bool is_over = engine.wait(*work, std::chrono::seconds(20));
  if (!is_over) engine.abort("the test is over");
  check(engine.wait(*work).code() == ErrorCode::kTimeout, work->status().text());
  check(contains(work->status().text(), "for one of " + std::to_string(kSlots) + " tensors in flight"),
        work->status().text());
});

const bool stood_still = testing::add("the time in which this process did not run is no time of waiting", [] {
  using namespace std::chrono_literals;
  for (const int program : {0, 1, 2, 3}) {
    const bool has_run = program != 0, is_late = program == 2, is_patient = program == 3;
    const auto segment = Segment::create(2);
    World& world = segment->world();
    Alarm alarm(world, 0, 10s);
    const Messages messages(world, 0);
    const auto begin = Clock::now() - 60s;
    Standstills standstills(begin);
    for (auto at = begin; has_run && at < Clock::now(); at += 500ms) standstills.look(at);
    Pending pending(world, alarm, messages, standstills);
    auto data = values_of(0, 10);
    const Request request = allreduce(is_patient ? "~t" : "t", data);
    const auto work = std::make_shared<Work>(std::make_shared<const Request>(request));
    pending.add(work, false);
    work->since = begin;
    if (is_late) Ghost(*segment, 1).announce(request);  // now: from here on it has the timeout once more
    const auto overdue = pending.overdue(thread_options(10s, is_late), [](std::uint32_t) { return false; });
    check_equal(!overdue.fact.empty(), program == 1, "a timeout");
    if (is_patient) check_equal(overdue.wait.ranks, 1U, "it waits");
  }
});

const bool told = testing::add("a rank that waits for all of its operations says so, until they are over", [] {
  const auto segment = Segment::create(3);
  Ghost ghost(*segment, 1), third(*segment, 2);
  Engine engine(segment, 0, thread_options(std::chrono::seconds(1), true));
  const Doing& doing = segment->world().member(0).doing;
  auto data = values_of(0, 10);
  static_cast<void>(engine.submit(allreduce("x", data)));
  std::thread waiter([&] { check(engine.wait_for_all(std::chrono::seconds(60)), "it is over"); });
  check(until([&] { return doing.waits == 1 && doing.text.read() == "in allreduce 'x'"; }), "it waits");
  segment->world().member(2).doing.waits.store(1);
  check(until([&] { return doing.waits == 2; }), "it waits for one that waits");
  ghost.announce(allreduce("x", data));
  third.announce(allreduce("x", data));
  waiter.join();
  check(until([&] { return doing.waits == 0 && doing.text.read().empty(); }), "and no more");
});

const bool ceased = testing::add("a call of MXNet that no look has seen of late is not believed to go on", [] {
  Activity activity;
  activity.set_line("train.py:3", {{1, false}});
  activity.set_line("train.py:3", {{1, true}});
  const auto now = Clock::now();
  check(activity.in_mxnet_since(now).has_value(), "seen a moment ago");
  check(!activity.in_mxnet_since(now + std::chrono::minutes(1)).has_value(), "seen a minute ago");
  activity.set_line("train.py:3", {{1, false}});
  check(*activity.in_mxnet_since(Clock::now()) > now, "another call of the same thread");
  activity.set_line("train.py:4", {});
  check(!activity.in_mxnet_since(now).has_value(), "it is over");
  const int one = 0, other = 0;  // worlds
  activity.set_wait(&one, {2, "allreduce 'x'"});
  check(activity.set_wait(&other, {}) == std::pair(2U, std::string("at train.py:4, in allreduce 'x'")), "the longest");
  activity.leave(&one);
  check(activity.set_wait(&other, {}).first == 0, "that world is left");
});

struct Observer final : BlockingObserver {
  void about_to_block() noexcept override { called.fetch_add(1); }
  std::atomic<int> called{0};
};

const bool held_lock = testing::add("who may wait for a peer that is stopped with a lock is told before", [] {
  const auto segment = Segment::create(2);
  Engine engine(segment, 0, thread_options());
  Ghost ghost(*segment, 1);
  auto known = values_of(0, 10), first = values_of(0, 10), second = values_of(0, 10);
  static_cast<void>(engine.submit(allreduce("known", known)));
  ghost.announce(allreduce("x", first));
  check_equal(missed_names(engine).size(), std::size_t{1}, "missed");
  SharedLock& lock = segment->world().table_lock;
  check(lock.try_lock(1), "free");
  check(!lock.try_lock(0), "taken");
  check(!engine.missed(kMost).has_value(), "no answer");
  std::atomic<Observer*> at_the_table{nullptr}, at_the_engine{nullptr};
  const auto submit = [&](std::atomic<Observer*>& seen, const char* name, std::vector<float>& data) {
    Observer observer;
    seen.store(&observer);
    auto work = engine.submit_to_wait(std::make_shared<Request>(allreduce(name, data)));
    static_cast<void>(engine.wait_briefly(*work));
    seen.store(nullptr);
  };
  const auto is_called = [](const std::atomic<Observer*>& seen) {
    return [&seen] { return seen.load() != nullptr && seen.load()->called.load() > 0; };
  };
  std::thread one([&] { submit(at_the_table, "new", first); });
  check(until(is_called(at_the_table)), "told at the lock of the table");
  check(until([&] { return !engine.waiting({}).has_value(); }), "the engine's lock is taken");
  // Its name is known: it needs only the lock of the engine, which the other thread has.
  std::thread two([&] { submit(at_the_engine, "known", second); });
  check(until(is_called(at_the_engine)), "told at the lock of the engine");
  lock.unlock();
  one.join();
  two.join();
  check_equal(missed_names(engine).size(), std::size_t{1}, "missed, again");
  check(!waiting(engine).empty(), "the others wait");
  engine.abort("the test is over");
});

}  // namespace
}  // namespace kvstore_hvd
