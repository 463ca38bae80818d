// Several hosts, each with a link: what ends. test_programs.cpp has values, order and disagreements.
#include "link/link.hpp"
#include "ranks.hpp"
#include "shm/arena.hpp"

namespace kvstore_hvd {
namespace {

// What a sum of four ranks ends with that begins when all have met and `change` has been called.
void sum_after(const Placement& placement, std::size_t count, std::chrono::seconds timeout,
               const std::function<void(MemoryNetwork&)>& change,
               const std::function<void(const Status&, int)>& expect_end) {
  std::atomic<int> ready{0};
  const auto body = [&](Engine& engine, int rank) {
    check(barrier(engine).ok(), "the barrier");
    ++ready;
    while (ready < 5) std::this_thread::yield();
    auto data = values_of(rank, count);
    expect_end(engine.run(allreduce("x", data)), rank);
  };
  const auto watch = [&](MemoryNetwork& network) {
    while (ready < 4) std::this_thread::yield();
    change(network);
    ++ready;
  };
  with_hosts(placement, body, timeout, 0, {}, {}, watch);
}

// Small ones travel with their announcements, large ones are ordered first.
const bool cut = testing::add("hosts that are cut off from each other hear of it at the deadline, and end", [] {
  for (const std::size_t count : {std::size_t{3}, std::size_t{300000}}) {
    const auto is_told = [](const Status& status, int) {
      check(status.code() == ErrorCode::kTimeout, status.text());
      check(status.text().find("waited 5 s for ") != std::string::npos, status.text());
    };
    sum_after({{0, 1}, {2, 3}}, count, std::chrono::seconds(5), [](MemoryNetwork& network) { network.cut(); }, is_told);
  }
});

const bool shortened = testing::add("a part of a sum that is shorter than it should be fails all hosts", [] {
  for (const int tag : {kPartials, kResults}) {
    const auto is_told = [tag](const Status& status, int rank) {
      if (rank == 3 && tag == kResults && status.ok()) return;  // it may have all before it hears of the failure
      check(status.code() == ErrorCode::kTransport, status.text());
      check(status.text().find("host testhost (rank 3) sent what is no record") != std::string::npos, status.text());
    };
    const auto shorten = [tag](MemoryNetwork& network) { network.shorten(tag); };
    sum_after({{0, 1, 2}, {3}}, 300000, std::chrono::seconds(60), shorten, is_told);
  }
});

// Host 0 sums in the array of its rank.
const bool late = testing::add("a result that comes after its sum has failed changes no array", [] {
  constexpr std::size_t kCount = 300000;
  constexpr float kNew = -7;
  std::atomic<int> failed{0};
  std::atomic<bool> is_delivered{false};
  const auto body = [&](Engine& engine, int rank) {
    const auto arena = std::make_shared<Arena>(engine.segment(), engine.local_rank());
    engine.protect(arena);
    auto* const array = static_cast<float*>(arena->allocate(kCount * sizeof(float)));
    std::fill_n(array, kCount, static_cast<float>(1 + rank));
    check(engine.run(allreduce("x", array, kCount)).code() == ErrorCode::kTimeout, "no result has come");
    std::fill_n(array, kCount, kNew);
    ++failed;
    while (!is_delivered) std::this_thread::yield();
    check(std::count(array, array + kCount, kNew) == kCount, "changed");
  };
  const auto watch = [&](MemoryNetwork& network) {
    network.hold(kResults);
    while (!network.has_message(0, kResults) || !network.has_message(1, kResults)) std::this_thread::yield();
    network.cut();  // the hosts do not hear of the failure, and go on
    while (failed < 2) std::this_thread::yield();
    network.resume();
    while (network.has_message(1, kResults)) std::this_thread::yield();
    is_delivered = true;
  };
  with_hosts({{0}, {1}}, body, std::chrono::seconds(5), std::size_t{16} << 20, {}, {}, watch);
});

// Over TCP what runs ahead of its receives would have to be kept.
const bool ahead = testing::add("a host that broadcasts goes no further than the others can take", [] {
  constexpr std::size_t kCount = std::size_t{4} << 20;  // twice as many chunks as may be under way
  std::atomic<bool> is_held{false}, is_checked{false};
  const auto body = [&](Engine& engine, int rank) {
    while (!is_held) std::this_thread::yield();
    std::vector<float> data(kCount, static_cast<float>(5 - rank));
    Request request = allreduce("x", data);
    request.collective = Collective::kBroadcast;
    request.root = 0;
    const auto work = engine.submit(std::move(request));
    if (rank == 0) {
      check(!engine.wait(*work, std::chrono::milliseconds(300)), "all is sent, and nothing has been acknowledged");
      is_checked = true;
    }
    check(engine.wait(*work).ok(), work->status().text());
    check(std::count(data.begin(), data.end(), 5.0F) == kCount, "values");
  };
  const auto watch = [&](MemoryNetwork& network) {
    network.hold(kResults);
    is_held = true;
    while (!is_checked) std::this_thread::yield();
    network.resume();
  };
  with_hosts({{0}, {1}}, body, std::chrono::seconds(60), 0, {}, {}, watch);
});

const bool again = testing::add("an array may be changed as soon as its sum is there, and what follows it stays", [] {
  constexpr std::size_t kCount = 100003, kMore = 13;
  const auto body = [&](Engine& engine, int rank) {
    Arena arena(engine.segment(), engine.local_rank());
    auto* const array = static_cast<float*>(arena.allocate((kCount + kMore) * sizeof(float)));
    std::fill_n(array + kCount, kMore, 7.0F);
    for (int i = 0; i < 50; ++i) {
      std::fill_n(array, kCount, static_cast<float>(i + rank));
      Request request = allreduce("x", array, kCount);
      request.prescale = i % 2 == 0 ? 1.0 : 0.5;
      check(engine.run(std::move(request)).ok(), "the sum");
      const float sum = static_cast<float>(2 * i + 1) * (i % 2 == 0 ? 1.0F : 0.5F);
      check(std::count(array, array + kCount, sum) == kCount, "of values that have changed");
      check(std::count(array + kCount, array + kCount + kMore, 7.0F) == kMore, "what follows");
    }
  };
  with_hosts({{0}, {1}}, body, std::chrono::seconds(60), std::size_t{1} << 20);
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

const bool idle = testing::add("hosts that compute for longer than one may be silent hear of each other", [] {
  if (thread_sanitizer()) return;
  const auto body = [](Engine& engine, int) {
    for (int i = 0; i < 2; ++i) {
      check(barrier(engine).ok(), "the barrier");
      std::this_thread::sleep_for(std::chrono::seconds(3));
    }
  };
  with_hosts({{0}, {1}}, body, std::chrono::seconds(60), 0, {}, {}, nullptr, {}, std::chrono::seconds(2));
});

const bool left = testing::add("arrivals are not compared while a host has no input left", [] {
  with_hosts({{0}, {1}}, [](Engine& engine, int rank) {
    std::vector<float> token(1), data(3);
    const auto run = [&] { check(engine.run(allreduce("x", data)).ok(), "run"); };
    std::shared_ptr<Work> work;
    if (rank == 1) work = engine.submit(allreduce("~left", token));
    for (int i = 0; i < 10; ++i) run();
    if (rank == 0) work = engine.submit(allreduce("~left", token));
    check(engine.wait(*work).ok(), "left");
    for (int i = 0; i < 5; ++i) run();
    const auto& compared = engine.segment()->world().member(0).counts.compared;
    while (compared.load() < 5) std::this_thread::yield();  // told twice a second
    check_equal(compared.load(), 5u, "those after it");
    check(barrier(engine).ok(), "barrier");
  });
});

const bool names = testing::add("ranks of other hosts are named by their own numbers, hosts and processes", [] {
  std::vector<std::pair<std::string, int>> processes;
  std::vector<int> of_all, there;
  for (int rank = 0; rank < 12; ++rank) {
    processes.emplace_back("n" + std::to_string(rank), 100 + rank);
    of_all.push_back(20 + rank);
    if (rank != 1) there.push_back(rank);
  }
  const auto segment = Segment::create(1, 0, {}, {7, 40, of_all}, std::nullopt, {0, {{1}, there}, processes});
  World& world = segment->world();
  std::string eight;
  for (const int rank : {0, 2, 3, 4, 5, 6, 7, 8}) {
    eight += (rank == 0 ? "" : ", ") + ("rank " + std::to_string(20 + rank)) + " (n" + std::to_string(rank) + ", pid " +
             std::to_string(100 + rank) + ")";
  }
  check_equal(describe_members(world, there), eight + " and ranks 29-31", "all of the other host");
  check_equal(describe_members(world, {1}), std::string("rank 21 (never joined)"), "of this one");
  check_equal(describe_host(world, 1), std::string("host n0 (ranks 20, 22-31)"), "the other host");
});

}  // namespace
}  // namespace kvstore_hvd
