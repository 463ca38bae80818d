// The recorder: by hand-made times, then in worlds that complete, fail and are lost.
#include <map>
#include <string>

#include "check.hpp"
#include "ranks.hpp"
#include "report/report.hpp"

namespace kvstore_hvd {
namespace {

using std::chrono::hours;
using testing::check;
using testing::check_equal;
using Time = std::chrono::steady_clock::time_point;

void check_order(const TimelineEvent& event) {
  check(event.submitted <= event.since && event.since <= event.scheduled && event.scheduled <= event.completed,
        event.name + ": times decrease");
}

const bool bounded = testing::add("what finds no room is counted, and there is room again once it is taken", [] {
  Timeline timeline;
  timeline.start(3);
  auto request = std::make_shared<Request>();
  const Work work(request);
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
  Work work(std::make_shared<Request>());
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

const bool recorded = testing::add("the engine records every operation of its rank", [] {
  constexpr int kRounds = 10;
  with_world(2, [](Engine& engine, int rank) {
    std::vector<float> small(10), large(100000), unlike(rank == 0 ? 3 : 4);
    const Time begin = std::chrono::steady_clock::now();
    check(engine.run(allreduce("before", small)).ok(), "before");
    engine.start_timeline(1000);
    for (int i = 0; i < kRounds; ++i) {
      const auto first = engine.submit(allreduce("small", small));
      const auto second = engine.submit(allreduce("large", large));
      const auto third = engine.submit(allreduce("large", large));  // waits for the second
      engine.wait(*first);
      engine.wait(*second);
      engine.wait(*third);
    }
    check(!engine.run(allreduce("unlike", unlike)).ok(), "shapes differ");
    engine.shutdown();
    const Time end = std::chrono::steady_clock::now();
    const TimelineEvents taken = engine.take_timeline();
    check_equal(taken.lost, 0u, "lost");
    check_equal(taken.events.size(), 3u * kRounds + 1, "events");
    std::map<std::string, Time> until;  // of the last one by name
    for (const TimelineEvent& event : taken.events) {
      check_order(event);
      check(begin <= event.submitted && event.completed <= end, event.name + ": a time outside of the run");
      check(event.since >= until[event.name], event.name + ": two at a time");
      until[event.name] = event.completed;
      const bool is_large = event.name == "large";
      if (event.name != "unlike") check_equal(event.bytes, (is_large ? large : small).size() * 4, event.name);
      check_equal(event.failed, event.name == "unlike", event.name + " failed");
      if (is_large) check(event.algorithm == algorithm_of_these_tests(Algorithm::kTwoShot), "algorithm");
      check_equal(event.label, "'" + event.name + "'", "label");
      check(event.round >= taken.events[0].round && event.round < taken.events[0].round + 2 * kRounds + 1, "round");
    }
    check_equal(until.size(), 3u, "names");
  });
});

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }
