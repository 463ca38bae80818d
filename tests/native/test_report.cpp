// What is measured and recorded of operations: rounds, exposed times and the timeline by hand-made times, then a world
// that completes and fails.
#include <set>

#include "ranks.hpp"
#include "report/flight.hpp"
#include "report/report.hpp"

namespace kvstore_hvd {
namespace {

using std::chrono::hours;
using Time = std::chrono::steady_clock::time_point;

// Submissions take their times from the clock, completions are said to be hours later: nothing in between matters.
long hours_of(std::chrono::nanoseconds duration) {
  return std::chrono::duration_cast<hours>(duration + std::chrono::minutes(30)).count();
}

std::int64_t nanoseconds_of(std::uint64_t duration) { return std::chrono::nanoseconds(hours(duration)).count(); }

std::shared_ptr<const Request> any_request() { return std::make_shared<Request>(); }

const bool exposed = testing::add("what completes after the last submission of a round is exposed", [] {
  std::atomic<std::int64_t> waited{0};
  Rounds rounds(waited);
  Statistics first, second, third;
  Work a(any_request()), b(any_request()), c(any_request());
  rounds.submitted(first, a);
  rounds.completed(first, a, a.submitted + hours(7));
  rounds.submitted(second, b);  // whatever `first` took, the rank was still computing
  rounds.submitted(third, c);
  b.submitted -= hours(5);
  c.scheduled = b.scheduled = c.submitted + hours(1);
  rounds.completed(third, c, c.submitted + hours(2));
  rounds.completed(second, b, c.submitted + hours(3));
  check_equal(hours_of(second.last.exposed), 0, "unknown as long as more may come");
  Work again(any_request());
  rounds.submitted(first, again);
  check_equal(hours_of(first.last.exposed), 0, "the first was hidden");
  check_equal(hours_of(third.last.exposed), 2, "the third");
  check_equal(hours_of(second.last.exposed), 3, "the second, from the submission of the third on");
  check_equal(hours_of(second.total.exposed), 3, "total");
  check_equal(rounds.statistics().count, 1u, "rounds that are over");
  check_equal(hours_of(rounds.statistics().exposed), 3, "the round waits for the last one");
  check_equal(hours_of(rounds.statistics().reducing), 2, "of which one was reduced for an hour, another for two");
});

const bool waiting =
    testing::add("a wait in the middle of a round counts if the program was blocked and went on at once", [] {
      const auto waited = [](int completed, int scheduled, int next, int blocked = 2) {
        std::atomic<std::int64_t> sum{0};
        Rounds rounds(sum);
        Statistics first, second;
        Work a(any_request()), b(any_request());
        a.submitted = Time(hours(1));
        rounds.submitted(first, a);
        for (int look = 0; look < 2; ++look) rounds.look(look < blocked);
        a.scheduled = Time(hours(scheduled));
        if (completed <= next) rounds.completed(first, a, Time(hours(completed)));
        b.submitted = Time(hours(next));
        rounds.submitted(second, b);
        rounds.completed(second, b, b.submitted);
        rounds.end(b.submitted + hours(5));
        check_equal(hours_of(rounds.statistics().exposed), 0, "the last one of the round was complete at once");
        return hours_of(std::chrono::nanoseconds(sum));
      };
      check_equal(waited(11, 11, 12), 10, "it went on at once");
      check_equal(waited(11, 11, 14), 0, "it may have computed");
      check_equal(waited(15, 11, 16), 10, "while it was reduced, it waited for no rank");
      check_equal(waited(11, 11, 12, 0), 0, "the program computed, as two looks found");
      check_equal(waited(11, 11, 12, 1), 5, "one look of two found it blocked");
    });

const bool early_waits = testing::add("waits before the first look are judged by it", [] {
  for (const bool is_blocked : {true, false}) {
    std::atomic<std::int64_t> sum{0};
    Rounds rounds(sum);
    Statistics statistics;
    for (int round = 0; round < 3; ++round) {
      check_equal(hours_of(std::chrono::nanoseconds(sum)), round < 2 ? 0 : 2 * is_blocked, "so far");
      Work work(any_request());
      work.submitted = Time(hours(10 * round));
      rounds.submitted(statistics, work);
      if (round > 0) rounds.look(is_blocked);
      work.scheduled = work.submitted + hours(1);
      rounds.completed(statistics, work, work.scheduled);
      rounds.end(work.scheduled);
    }
  }
});

const bool two_times = testing::add("an operation is queued until its first chunk, and then it is reduced", [] {
  Work work(any_request());
  work.submitted = Time(hours(1));
  work.scheduled = Time(hours(3));
  Statistics statistics;
  for (int i = 0; i < 2; ++i) statistics.add(work, Time(hours(7)));
  check(statistics.last.queued == hours(2) && statistics.last.reducing == hours(4), "the last one");
  check(statistics.total.queued == hours(4) && statistics.total.reducing == hours(8), "both");
});

const bool overlapping = testing::add("an operation that outlasts its round is exposed until the round ends", [] {
  std::atomic<std::int64_t> waited{0};
  Rounds rounds(waited);
  Statistics slow;
  Work a(any_request()), b(any_request());
  rounds.submitted(slow, a);
  rounds.end(a.submitted + hours(4));
  rounds.submitted(slow, b);
  rounds.completed(slow, a, a.submitted + hours(9));
  check_equal(hours_of(slow.last.exposed), 4, "until the end of its round");
  rounds.completed(slow, b, b.submitted + hours(1));
  rounds.end(b.submitted + hours(3));
  check_equal(hours_of(slow.total.exposed), 5, "total");
  rounds.end(b.submitted + hours(4));
  check_equal(rounds.statistics().count, 2u, "nothing was submitted in the last one");
  check_equal(hours_of(rounds.statistics().exposed), 5, "until each round's end");
});

const bool bounded = testing::add("names that are used once are counted together when there are too many", [] {
  with_world(1, [](Engine& engine, int) {
    std::vector<float> data(1);
    const int names = kSlots + 1000;
    for (int i = 0; i < names; ++i) check(engine.run(allreduce("once" + std::to_string(i), data)).ok(), "run");
    std::uint64_t operations = 0;
    const auto all = engine.report().names;
    for (const auto& [name, one] : all) operations += one.operations;
    check_equal(operations, static_cast<std::uint64_t>(names), "none is lost");
    check(all.size() <= kSlots + 2, "bounded");
  });
  with_world(1, [](Engine& engine, int) {
    std::vector<float> data(1);
    const int names = kSlots + 1000;
    for (int i = 0; i < names; ++i) {
      check(engine.run(allreduce("once" + std::to_string(i), data)).ok(), "run");
      check(engine.run(allreduce("again", data)).ok(), "run");
    }
    const EngineStatistics all = engine.report();
    const auto is_it = [](const auto& one) { return one.first == "again"; };
    const auto again = std::find_if(all.names.begin(), all.names.end(), is_it);
    check(again != all.names.end() && again->second.operations == names, "a name in use is not forgotten");
    check_equal(all.rounds.count, static_cast<std::uint64_t>(names), "its rounds end");
  });
  Statistics one, sum;
  one.operations = one.bytes = 1;
  one.total = one.last = Times{hours(1), hours(2), hours(3)};
  for (int i = 0; i < 2; ++i) sum.add(one);
  check(sum.bytes == 2 && sum.total.queued == hours(2) && sum.total.reducing == hours(4), "counted together");
  check(sum.total.exposed == hours(6) && sum.last.exposed == hours(3), "exposed");
});

void check_order(const TimelineEvent& event) {
  check(event.submitted <= event.since && event.since <= event.scheduled && event.scheduled <= event.completed,
        event.name + ": times decrease");
}

const bool no_room = testing::add("what finds no room is counted, and there is room again once it is taken", [] {
  Timeline timeline;
  timeline.start(3);
  const Work work(any_request());
  for (int i = 0; i < 10; ++i) timeline.record(work, Time(hours(i)), false);
  TimelineEvents taken = timeline.take();
  check_equal(taken.events.size(), 3u, "kept");
  check_equal(taken.lost, 7u, "lost");
  check(taken.events.back().completed == Time(hours(2)), "the first ones are kept, in their order");
  timeline.record(work, Time(hours(11)), false);
  taken = timeline.take();
  check_equal(taken.events.size(), 1u, "again");
  check_equal(taken.lost, 0u, "counted once");
});

const bool ordered = testing::add("times never decrease, whatever was seen first", [] {
  Timeline timeline;
  timeline.start(3);
  Work work(any_request());
  work.submitted = work.since = Time(hours(5));
  work.scheduled = Time(hours(4));  // before this rank has looked at the clock
  timeline.record(work, Time(hours(6)), false);
  work.scheduled = Time();  // never
  timeline.record(work, Time(hours(7)), true);
  work.submitted = Time(hours(3));  // the one before it was over at 5
  work.scheduled = Time(hours(6));
  timeline.record(work, Time(hours(8)), false);
  const TimelineEvents taken = timeline.take();
  for (const TimelineEvent& event : taken.events) check_order(event);
  check(taken.events[0].scheduled == Time(hours(5)), "scheduled at once");
  check(taken.events[1].scheduled == Time(hours(7)) && taken.events[1].failed, "waited until it failed");
  check(taken.events[2].since == Time(hours(5)), "since");
});

const bool flights = testing::add("the last operations of a rank are kept, those under way as well", [] {
  const auto segment = Segment::create(1);
  World& world = segment->world();
  FlightRecorder recorder(world, 0);
  for (std::uint64_t n = 0; n < kFlightRecords + 10; ++n) {
    Request request;
    request.dtype = DType::kFloat64;
    request.count = n;
    Work work(std::make_shared<Request>(request));
    work.since = Time(hours(n + 1));
    work.scheduled = Time(hours(n + 2));
    work.algorithm = Algorithm::kDirect;
    recorder.begin(work, 7, 8, n);
    if (n % 2 == 0) recorder.end(work, Time(hours(n + 3)));
  }
  const std::vector<Flight> all = read_flights(world, 0);
  check_equal(all.size(), kFlightRecords, "operations that are kept");
  check_equal(read_flights(world, 0, 3).size(), kFlightRecords / 2, "those under way");
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Flight& one = all[i];
    const bool is_over = one.operation % 2 == 0;
    check_equal(one.operation, i + 10, "in their order");
    check(one.slot == 7 && one.version == 8 && one.bytes == 8 * one.operation && one.dtype == DType::kFloat64, "what");
    check_equal(one.announced, nanoseconds_of(one.operation + 1), "announced");
    check_equal(one.scheduled, is_over ? nanoseconds_of(one.operation + 2) : 0, "scheduled");
    check_equal(one.completed, is_over ? nanoseconds_of(one.operation + 3) : 0, "completed");
    check(!is_over || one.algorithm == Algorithm::kDirect, "algorithm");
  }
  check_equal(world.member(0).counts.operations.load(), kFlightRecords / 2 + 5, "operations that are over");
});

const bool kept = testing::add("the record of an operation under way outlives those of others", [] {
  const auto segment = Segment::create(1);
  FlightRecorder recorder(segment->world(), 0);
  Work early(any_request());
  recorder.begin(early, 1, 0, 7);
  for (std::uint64_t n = 0; n < 3 * kFlightRecords; ++n) {
    Work work(any_request());
    recorder.begin(work, 2, 0, n);
    recorder.end(work, Time(hours(n + 1)));
  }
  for (const std::size_t most : {kFlightRecords, 2 * kFlightRecords / 3}) {
    const std::vector<Flight> told = read_flights(segment->world(), 0, most);
    check(told.size() == most && told.front().operation == 7, "the first one");
  }
  recorder.end(early, Time(hours(1)));
});

const bool last = testing::add("who came last is counted once, and how far behind the median", [] {
  const auto segment = Segment::create(4);
  World& world = segment->world();
  std::vector<FlightRecorder> recorders;
  for (int r = 0; r < 4; ++r) recorders.emplace_back(world, r);
  Arrivals arrivals(world);
  // Two operations in which ranks come after 1, 2, 3 and 10 hours; in the second one rank 2 comes last.
  for (int n = 0; n < 2; ++n) {
    const int late[] = {1, 2, n == 0 ? 3 : 10, n == 0 ? 10 : 3};
    for (int r = 0; r < 4; ++r) {
      Work work(any_request());
      work.since = Time(hours(100 * n + late[r]));
      recorders[static_cast<std::size_t>(r)].begin(work, 0, 0, static_cast<std::uint64_t>(n));
      if (n == 1 && r == 0) arrivals.count(Time(hours(100 * n + 9)));
      recorders[static_cast<std::size_t>(r)].end(work, Time(hours(100 * n + 10)));
    }
  }
  for (int look = 0; look < 2; ++look) arrivals.count(Time(hours(200)));
  const auto of = [&](int r) -> const Counts& { return world.member(r).counts; };
  for (int r = 0; r < 4; ++r) {
    check_equal(of(r).compared.load(), 2u, "operations that were compared");
    check_equal(of(r).last.load(), r >= 2 ? 1u : 0u, "those in which it came last");
    check_equal(of(r).behind.load(), r >= 2 ? nanoseconds_of(8) : 0, "behind the median");
  }
});

const bool counted = testing::add("the engine counts and records every operation of its rank", [] {
  constexpr std::uint64_t kRounds = 20;
  with_world(2, [](Engine& engine, int rank) {
    std::vector<float> small(10), large(100000), unlike(rank == 0 ? 3 : 4);
    const Time begin = std::chrono::steady_clock::now();
    check(engine.run(allreduce("small", small)).ok(), "before");
    engine.start_timeline(1000);
    for (std::uint64_t i = 0; i < kRounds; ++i) {
      const auto first = engine.submit(allreduce("small", small));
      const auto second = engine.submit(allreduce("large", large));
      const auto third = engine.submit(allreduce("large", large));  // waits for the second
      for (const auto& work : {first, second, third}) engine.wait(*work);
    }
    check(!engine.run(allreduce("unlike", unlike)).ok(), "shapes differ");
    std::vector<std::pair<std::string, Statistics>> all = engine.report().names;
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    if (!check(all.size() == 3, "three names")) return;
    const auto& [large_name, of_large] = all[0];
    const auto& [small_name, of_small] = all[1];
    check(large_name == "large" && small_name == "small" && all[2].first == "unlike", "names");
    check_equal(of_large.operations, 2 * kRounds, "operations");
    check(of_large.bytes == 2 * kRounds * large.size() * sizeof(float), "bytes");
    check(of_small.operations == kRounds + 1 && of_small.bytes == (kRounds + 1) * small.size() * sizeof(float),
          "small");
    check(of_large.algorithm == algorithm_of_these_tests(Algorithm::kTwoShot), "algorithm of the large one");
    check(all[2].second.algorithm == Algorithm::kFail && all[2].second.bytes == 0, "failed");
    for (const auto& [name, one] : all) {
      for (const Times& times : {one.total, one.last}) {
        check(times.queued.count() >= 0 && times.reducing.count() >= 0 && times.exposed.count() >= 0, name);
        check(times.exposed <= times.queued + times.reducing, name + " exposed for longer than it took");
      }
      check(one.last.reducing <= one.total.reducing, name);
    }
    const std::string unmet = "unmet" + std::to_string(rank);
    const auto lost = engine.submit(allreduce(unmet, small)), next = engine.submit(allreduce(unmet, small));
    check(engine.run(allreduce("small", large)).ok(), "both ranks are here");
    engine.abort("the test ends it");
    check(!engine.wait(*lost).ok() && !engine.wait(*next).ok(), "lost");
    engine.shutdown();
    const Time end = std::chrono::steady_clock::now();
    const TimelineEvents taken = engine.take_timeline();
    check_equal(taken.lost, 0u, "lost");
    check_equal(taken.events.size(), 3u * kRounds + 4, "events");
    std::map<std::string, Time> until;  // of the last one by name
    for (const TimelineEvent& event : taken.events) {
      check_order(event);
      check(begin <= event.submitted && event.completed <= end, event.name + ": a time outside of the run");
      check(event.since >= until[event.name], event.name + ": two at a time");
      until[event.name] = event.completed;
      const bool is_large = event.name == "large";
      if (event.name != "unlike" && !(event.name == "small" && event.bytes > 40))
        check_equal(event.bytes, (is_large ? large : small).size() * 4, event.name);
      check_equal(event.failed, event.name[0] == 'u', event.name + " failed");
      if (is_large) check(event.algorithm == algorithm_of_these_tests(Algorithm::kTwoShot), "algorithm");
      check_equal(event.label, "'" + event.name + "'", "label");
    }
    std::vector<TimelineEvent> submitted = taken.events;
    std::sort(submitted.begin(), submitted.end(),
              [](const auto& a, const auto& b) { return a.submitted < b.submitted; });
    std::set<std::string> of_round;
    for (const TimelineEvent& event : submitted) {
      // report() has ended a round, too.
      const bool begins = of_round.empty() || of_round.count(event.name) > 0 || event.name == unmet;
      check_equal(event.begins_round, begins, event.name + " begins a round");
      if (event.begins_round) of_round.clear();
      of_round.insert(event.name);
    }
    check_equal(until.size(), 4u, "names");
  });
});

}  // namespace
}  // namespace kvstore_hvd
