// Several hosts, each with a link: values, order, disagreements, departures and failures.
#include <algorithm>
#include <atomic>
#include <random>
#include <string>

#include "check.hpp"
#include "link/link.hpp"
#include "ranks.hpp"
#include "reduce/reduce.hpp"
#include "shm/arena.hpp"

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

// Tensors that travel together are chosen by what is known on the first host.
const bool mixed =
    testing::add("arrays that lie in arenas on one host and elsewhere on another have the right sums", [] {
      const Placement placement{{0, 1}, {2, 3}};
      constexpr std::size_t kCount = 20000;
      constexpr std::uint32_t kTensors = 8;
      with_hosts(
          placement,
          [&](Engine& engine, int rank) {
            Arena arena(engine.segment(), engine.local_rank());
            std::vector<float> outside(kCount * kTensors);
            for (std::uint32_t round = 0; round < 10; ++round) {
              std::vector<float*> arrays;
              std::vector<std::shared_ptr<Work>> works;
              for (std::uint32_t t = 0; t < kTensors; ++t) {
                const bool is_outside = rank >= 2 && t % 2 == 1;
                arrays.push_back(is_outside ? &outside[t * kCount] : static_cast<float*>(arena.allocate(kCount * 4)));
                for (std::size_t i = 0; i < kCount; ++i) arrays[t][i] = value_of(rank, i, t);
                std::vector<float> none;
                Request request = allreduce("t" + std::to_string(t), none, -static_cast<int>(t));
                request.inputs = {arrays[t]};
                request.outputs = {arrays[t]};
                request.count = kCount;
                request.shape = {static_cast<std::int64_t>(kCount)};
                works.push_back(engine.submit(std::move(request)));
              }
              for (std::uint32_t t = 0; t < kTensors; ++t) {
                check(engine.wait(*works[t]).ok(), works[t]->status().text());
                const std::vector<float> result(arrays[t], arrays[t] + kCount);
                check(same_bits(
                          result,
                          [&](std::size_t i) { return sum_over(placement, [&](int r) { return value_of(r, i, t); }); }),
                      "tensor " + std::to_string(t));
                if (arena.contains(arrays[t])) arena.free(arrays[t]);
              }
            }
            engine.shutdown();
          },
          std::chrono::seconds(60), std::size_t{8} << 20);
    });

// A program that all ranks derive from the seed: operations of all kinds, submitted by each rank in an order of its
// own.
void run_program(Engine& engine, int rank, const Placement& placement, std::uint32_t seed) {
  struct Step {
    Collective collective;
    std::string name;
    std::size_t count;
    int root;
    int odd_one;  // the rank that submits another number of elements, or -1
    std::vector<float> input, output;
  };
  const int size = engine.size();
  std::mt19937 all(seed), own(seed * 31 + static_cast<std::uint32_t>(rank));
  std::vector<Step> steps(1 + all() % 12);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    Step& one = steps[i];
    constexpr Collective kKinds[]{Collective::kAllreduce, Collective::kAllreduce, Collective::kBroadcast,
                                  Collective::kExchange, Collective::kReduceScatter};
    one.collective = kKinds[all() % 5];
    one.name = "t" + std::to_string(i);
    one.count = all() % 3 == 0 ? all() % 4 : std::size_t{1} << (all() % 17);
    one.root = static_cast<int>(all() % static_cast<unsigned>(size));
    one.odd_one = all() % 10 == 0 ? static_cast<int>(all() % static_cast<unsigned>(size)) : -1;
    if (rank == one.odd_one) ++one.count;
    one.input = values_of(rank, one.count, static_cast<std::uint32_t>(i));
    one.output.resize(one.count * (one.collective == Collective::kExchange ? static_cast<std::size_t>(size) : 1),
                      -1.0F);
  }
  std::vector<std::size_t> order(steps.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), own);
  std::vector<std::shared_ptr<Work>> works(steps.size());
  for (const std::size_t i : order) {
    Step& one = steps[i];
    Request request = allreduce(one.name, one.output, static_cast<int>(own() % 3));
    const std::size_t bytes = one.count * sizeof(float);
    request.collective = one.collective;
    request.inputs = {one.input.data()};
    request.count = one.count;
    request.contributed = one.count;
    request.shape = {static_cast<std::int64_t>(one.count)};
    if (one.collective == Collective::kBroadcast) request.root = one.root;
    if (one.collective == Collective::kReduceScatter) request.parts = {Part{rank, 0, bytes, 0}};
    for (int r = 0; one.collective == Collective::kExchange && r < size; ++r) {
      request.parts.push_back(Part{r, 0, bytes, bytes * static_cast<std::size_t>(r)});
    }
    if (own() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
    works[i] = engine.submit(std::move(request));
  }
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Status status = engine.wait(*works[i]);
    const Step& one = steps[i];
    const std::string what = "program " + std::to_string(seed) + ", " + one.name + ": " + status.text();
    if (one.odd_one >= 0 && size > 1) {
      check(status.code() == ErrorCode::kMismatch, what);
      check(same_bits(one.output, [](std::size_t) { return -1.0F; }), what + " changed the output");
      continue;
    }
    const auto tensor = static_cast<std::uint32_t>(i);
    const auto expected = [&](std::size_t e) {
      if (one.collective == Collective::kBroadcast) return value_of(one.root, e, tensor);
      if (one.collective == Collective::kExchange) {
        return value_of(static_cast<int>(e / one.count), e % one.count, tensor);
      }
      return sum_over(placement, [&](int r) { return value_of(r, e, tensor); });
    };
    check(status.ok(), what);
    check(same_bits(one.output, expected), what);
  }
}

// KVHVD_TEST_PROGRAMS: how many.
const bool programs = testing::add("random programs have the same results on every rank", [] {
  const char* const text = std::getenv("KVHVD_TEST_PROGRAMS");
  const int n = text != nullptr ? std::atoi(text) : thread_sanitizer() ? 40 : 200;
  const std::vector<Placement> placements{{{0, 1}, {2, 3}}, {{0, 1}, {2}}, {{0}, {1}, {2}}, {{0, 2}, {1}, {3}}};
  for (std::size_t p = 0; p < placements.size(); ++p) {
    with_hosts(placements[p], [&](Engine& engine, int rank) {
      for (int i = 0; i < n / 4; ++i) {
        run_program(engine, rank, placements[p], static_cast<std::uint32_t>(i * 4 + static_cast<int>(p)));
      }
    });
  }
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
      check(status.text().find("waited 5 s for ") != std::string::npos, status.text());
    };
    const auto watch = [&](MemoryNetwork& network) {
      while (ready < 4) std::this_thread::yield();
      network.cut();
      ++ready;
    };
    with_hosts({{0, 1}, {2, 3}}, body, std::chrono::seconds(5), 0, {}, {}, watch);
  }
});

const bool shortened = testing::add("a part of a sum that is shorter than it should be fails all hosts", [] {
  for (const int tag : {kPartials, kResults}) {
    std::atomic<int> ready{0};
    const auto body = [&](Engine& engine, int rank) {
      check(barrier(engine).ok(), "the barrier");
      ++ready;
      while (ready < 5) std::this_thread::yield();
      auto data = values_of(rank, 300000);
      const Status status = engine.run(allreduce("x", data));
      if (rank == 3 && tag == kResults && status.ok()) return;  // it may have all before it hears of the failure
      check(status.code() == ErrorCode::kTransport, status.text());
      check(status.text().find("host testhost (rank 3) sent what is no record") != std::string::npos, status.text());
    };
    const auto watch = [&](MemoryNetwork& network) {
      while (ready < 4) std::this_thread::yield();
      network.shorten(tag);
      ++ready;
    };
    with_hosts({{0, 1, 2}, {3}}, body, std::chrono::seconds(60), 0, {}, {}, watch);
  }
});

// The first host's sockets end at a thread that passes bytes on, from some time on slowly: what the kernel holds takes
// longer than a host may be silent, and its beats come behind that.
const bool slow = testing::add("a host whose bytes come slowly is not silent", [] {
  if (thread_sanitizer()) return;
  constexpr std::chrono::seconds kSilence{2};
  constexpr std::size_t kAtOnce = 4 << 10, kCount = 100000;  // for five seconds
  const auto there = tcp_connections(2), here = tcp_connections(2);
  const int near[2] = {there[1][0], here[0][1]};
  std::atomic<bool> is_slow{false}, is_over{false};
  std::thread network([&] {
    std::vector<char> bytes(kAtOnce);
    while (!is_over) {
      for (int from = 0; from < 2; ++from) {
        const ssize_t n = recv(near[from], bytes.data(), bytes.size(), MSG_DONTWAIT);
        if (n > 0)
          check(send(near[1 - from], bytes.data(), static_cast<std::size_t>(n), MSG_NOSIGNAL) == n, "passed on");
      }
      std::this_thread::sleep_for(is_slow ? std::chrono::milliseconds(50) : std::chrono::milliseconds(1));
    }
  });
  const auto body = [&](Engine& engine, int rank) {
    check(barrier(engine).ok(), "the barrier");
    is_slow = true;
    auto data = values_of(rank, kCount);
    Request request = allreduce("x", data);
    request.collective = Collective::kBroadcast;
    const Status status = engine.run(std::move(request));
    if (rank == 1) is_slow = false;  // the other one is done when all is sent
    check(status.ok(), status.text());
  };
  with_hosts({{0}, {1}}, body, std::chrono::seconds(60), 0, {}, {}, nullptr,
             {tcp_transport({-1, there[0][1]}), tcp_transport({here[1][0], -1})}, kSilence);
  is_over = true;
  network.join();
  for (const int socket : near) close(socket);
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
