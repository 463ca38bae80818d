// Several hosts, each with a link: values, order, disagreements, departures and failures.
#include <algorithm>
#include <atomic>
#include <random>
#include <string>

#include "check.hpp"
#include "link/link.hpp"
#include "ranks.hpp"
#include "reduce/reduce.hpp"

namespace kvstore_hvd {
namespace {

using testing::check;

const std::vector<Placement> kPlacements{
    {{0}, {1}}, {{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}, {{0, 1}, {2}, {3, 4, 5, 6}}, {{0}, {1}, {2}, {3}, {4}}};

int size_of(const Placement& placement) {
  std::size_t size = 0;
  for (const auto& ranks : placement) size += ranks.size();
  return static_cast<int>(size);
}

const bool sums = testing::add("allreduce equals the sum over hosts of the sums over their ranks, bit by bit", [] {
  for (const Placement& placement : kPlacements) {
    with_hosts(placement, [&](Engine& engine, int rank) {
      check(engine.size() == size_of(placement), "size");
      check(engine.rank() == rank, "rank");
      for (const std::size_t count : {0, 1, 3, 17, 1024, 1025, 16384, 100003, 1 << 20}) {
        auto data = values_of(rank, count);
        const Status status = engine.run(allreduce("t" + std::to_string(count), data));
        check(status.ok(), status.text());
        check(
            same_bits(data, [&](std::size_t i) { return sum_over(placement, [&](int r) { return value_of(r, i); }); }),
            "wrong sum of " + std::to_string(count));
      }
    });
  }
});

const bool many = testing::add("64 ranks on 4 hosts", [] {
  if (thread_sanitizer()) return;  // hundreds of threads take it minutes, and add no interleaving
  Placement placement(4);
  for (int rank = 0; rank < 64; ++rank) placement[static_cast<std::size_t>(rank % 4)].push_back(rank);
  with_hosts(placement, [&](Engine& engine, int rank) {
    for (const std::size_t count : {10, 5000, 100000}) {
      auto data = values_of(rank, count);
      check(engine.run(allreduce("t" + std::to_string(count), data)).ok(), "run");
      check(same_bits(data, [&](std::size_t i) { return sum_over(placement, [&](int r) { return value_of(r, i); }); }),
            "wrong sum of " + std::to_string(count));
    }
  });
});

const bool together = testing::add("bits do not depend on what travels with what, nor on the order of submission", [] {
  const Placement placement{{0, 1}, {2, 3}, {4}};
  constexpr int kTensors = 60;
  with_hosts(placement, [&](Engine& engine, int rank) {
    for (std::uint32_t round = 0; round < 20; ++round) {
      std::mt19937 own(round * 31 + static_cast<std::uint32_t>(rank));
      std::vector<std::vector<float>> data;
      std::vector<int> order;
      for (int t = 0; t < kTensors; ++t) {
        data.push_back(values_of(rank, static_cast<std::size_t>(t * t * 7 + 1), static_cast<std::uint32_t>(t)));
        order.push_back(t);
      }
      std::shuffle(order.begin(), order.end(), own);
      std::vector<std::shared_ptr<Work>> works;
      for (const int t : order) {
        works.push_back(engine.submit(allreduce("t" + std::to_string(t), data[t], static_cast<int>(own() % 3))));
      }
      for (const auto& work : works) check(engine.wait(*work).ok(), work->status().text());
      for (int t = 0; t < kTensors; ++t) {
        const auto expected = [&](std::size_t i) {
          return sum_over(placement, [&](int r) { return value_of(r, i, static_cast<std::uint32_t>(t)); });
        };
        check(same_bits(data[t], expected), "tensor " + std::to_string(t));
      }
    }
  });
});

// Small ones travel with their announcements, large ones are ordered first.
const bool cut = testing::add("hosts that are cut off from each other hear of it at the deadline, and end", [] {
  for (const std::size_t count : {std::size_t{3}, std::size_t{300000}}) {
    std::atomic<int> ready{0};
    const auto body = [&](Engine& engine, int rank) {
      check(barrier(engine).ok(), "the barrier");
      ++ready;
      while (ready < 5) std::this_thread::yield();
      auto data = values_of(rank, count);
      const Status status = engine.run(allreduce("x", data));
      check(status.code() == ErrorCode::kTimeout, status.text());
      check(status.text().find("waited 1 s for ") != std::string::npos, status.text());
    };
    const auto watch = [&](MemoryNetwork& network) {
      while (ready < 4) std::this_thread::yield();
      network.cut();
      ++ready;
    };
    with_hosts({{0, 1}, {2, 3}}, body, std::chrono::seconds(1), 0, {}, {}, watch);
  }
});

const bool first_failure = testing::add("a failure on one host is that of all, with its text", [] {
  with_hosts({{0, 1}, {2}, {3}}, [&](Engine& engine, int rank) {
    check(barrier(engine).ok(), "the barrier");
    if (rank == 3) {
      engine.abort("rank 3 gave up");
    } else {
      auto data = values_of(rank, 100000);
      const Status status = engine.run(allreduce("never", data));
      check(status.code() == ErrorCode::kTransport, status.text());
      check(status.text().find("rank 3 gave up") != std::string::npos, status.text());
    }
    check(!engine.health().ok(), "latched");
  });
});

const bool tables = testing::add("a table of hosts that fits no world is refused", [] {
  for (const Hosts& hosts : {Hosts{0, {{0}, {0}}}, Hosts{0, {{0}, {2}}}, Hosts{0, {{0, 1}, {}}},
                             Hosts{2, {{0, 1}, {2}}}, Hosts{1, {{0, 1}, {2}}}}) {
    bool is_refused = false;
    try {
      Segment::create(2, 0, {}, {}, std::nullopt, hosts);
    } catch (const std::invalid_argument&) {
      is_refused = true;
    }
    check(is_refused, "taken");
  }
});

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }
