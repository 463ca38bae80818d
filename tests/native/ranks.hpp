// Worlds for tests: ranks as threads of this process, on one mapping of each host's segment, so that ThreadSanitizer
// sees all of their accesses.
//
// For the same tests of the same promises, in the environment: KVHVD_TEST_HOSTS, the ranks are on as many hosts;
// KVHVD_TEST_TCP, hosts are connected by TCP.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "check.hpp"
#include "engine/engine.hpp"
#include "link/link.hpp"
#include "link/transport.hpp"
#include "network.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

using testing::check;
using testing::check_equal;
using testing::contains;

// Tests leave out what it cannot run, or what would take it minutes.
constexpr bool thread_sanitizer() {
#if defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}

inline EngineOptions thread_options(std::chrono::nanoseconds timeout = std::chrono::seconds(60),
                                    bool waits_for_busy = false) {
  EngineOptions options;
  options.waits_for_busy = waits_for_busy;
  options.timeout = timeout;
  options.watch_peers = false;
  options.host = "testhost";
  return options;
}

inline int hosts_of_these_tests() {
  const char* text = std::getenv("KVHVD_TEST_HOSTS");
  return text == nullptr ? 1 : std::atoi(text);
}

inline Algorithm algorithm_of_these_tests(Algorithm on_one_host) {
  return hosts_of_these_tests() > 1 && on_one_host == Algorithm::kTwoShot ? Algorithm::kLinkSum : on_one_host;
}

// The ranks of a world, by host.
using Placement = std::vector<std::vector<int>>;

// The ranks of a world of that size on the hosts of these tests, in order.
inline Placement placement_of(int size) {
  const int hosts = std::min(hosts_of_these_tests(), size);
  Placement placement(static_cast<std::size_t>(hosts));
  for (int rank = 0; rank < size; ++rank) placement[static_cast<std::size_t>(rank * hosts / size)].push_back(rank);
  return placement;
}

// A TCP connection between each two of these hosts, on loopback: by host, and by the other one.
inline std::vector<std::vector<int>> tcp_connections(std::size_t hosts) {
  std::vector<std::vector<int>> sockets(hosts, std::vector<int>(hosts, -1));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool works = bind(listener, generic, bytes) == 0 && listen(listener, 1) == 0;
  works = works && getsockname(listener, generic, &bytes) == 0;
  for (std::size_t a = 0; a < hosts; ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      sockets[a][b] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      works = works && connect(sockets[a][b], generic, bytes) == 0;
      sockets[b][a] = accept(listener, nullptr, nullptr);
      works = works && sockets[b][a] >= 0;
    }
  }
  close(listener);
  check(works, "no TCP on loopback");
  return sockets;
}

// `kept`: bytes that the kernel is asked to keep of what was sent; 0: as many as it likes.
inline std::vector<std::shared_ptr<Transport>> tcp_transports(std::size_t hosts, int kept = 0) {
  std::vector<std::shared_ptr<Transport>> ends;
  for (const auto& sockets : tcp_connections(hosts)) {
    for (const int one : sockets) {
      if (kept > 0) setsockopt(one, SOL_SOCKET, SO_SNDBUF, &kept, sizeof(kept));
    }
    ends.push_back(tcp_transport(sockets));
  }
  return ends;
}

// Serves the link as LinkLoop does, until all links are over: what a host has sent moves only while it calls.
inline void run_link(const std::shared_ptr<Segment>& segment, const std::shared_ptr<Transport>& transport,
                     std::chrono::nanoseconds timeout, std::atomic<std::size_t>& n_over, std::size_t hosts,
                     std::chrono::nanoseconds silence) {
  Link link(segment, transport, LinkOptions{timeout, silence});
  while (!link.is_over()) {
    const std::uint32_t seen = link.bell().value();
    if (link.step(std::chrono::steady_clock::now())) continue;
    if (link.is_busy()) {
      std::this_thread::yield();
      continue;
    }
    if (link.failure().is_set()) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    } else {
      link.bell().wait_change(seen, WaitPolicy{}, std::chrono::microseconds(100), link.failure());
    }
  }
  ++n_over;
  // After a failure what was sent to a link that is gone is never over.
  while (!link.close() || n_over < hosts) {
    if (n_over == hosts && link.failure().is_set()) return;
    transport->progress();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// Whether `body` returns true in a forked child, which ends then.
inline bool succeeds_in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = 1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// How messages name the ranks: Hosts::processes.
inline std::vector<std::pair<std::string, int>> test_processes(const Placement& placement) {
  std::size_t size = 0;
  for (const auto& ranks : placement) size += ranks.size();
  return std::vector<std::pair<std::string, int>>(size, {"testhost", static_cast<int>(getpid())});
}

// Runs `body(engine, rank)` on every rank of a fresh world, on these hosts, and `watch` beside them. `ends`: the hosts'
// transports, in place of those of these tests.
inline void with_hosts(const Placement& placement, const std::function<void(Engine&, int)>& body,
                       std::chrono::nanoseconds timeout = std::chrono::seconds(60), std::size_t arena_bytes = 0,
                       const Thresholds& thresholds = {}, const Inside& inside = {},
                       const std::function<void(MemoryNetwork&)>& watch = nullptr,
                       std::vector<std::shared_ptr<Transport>> ends = {},
                       std::chrono::nanoseconds silence = std::chrono::seconds(thread_sanitizer() ? 60 : 10)) {
  MemoryNetwork network(static_cast<std::uint32_t>(placement.size()));
  const bool over_tcp = std::getenv("KVHVD_TEST_TCP") != nullptr && watch == nullptr && ends.empty();
  std::atomic<std::size_t> n_over{0};
  std::vector<std::shared_ptr<Segment>> segments;
  std::vector<std::thread> threads;
  if (over_tcp) ends = tcp_transports(placement.size());
  for (std::size_t host = 0; host < placement.size(); ++host) {
    segments.push_back(Segment::create(static_cast<int>(placement[host].size()), arena_bytes, thresholds, inside,
                                       std::nullopt,
                                       Hosts{static_cast<int>(host), placement, test_processes(placement)}));
    if (ends.size() <= host) ends.push_back(std::make_shared<MemoryNetwork::End>(network, static_cast<int>(host)));
  }
  for (std::size_t host = 0; host < placement.size(); ++host) {
    if (placement.size() > 1) {
      threads.emplace_back(
          [&, host] { run_link(segments[host], ends[host], timeout, n_over, placement.size(), silence); });
    }
    for (std::size_t local = 0; local < placement[host].size(); ++local) {
      threads.emplace_back([&, host, local] {
        Engine engine(segments[host], static_cast<int>(local), thread_options(timeout));
        body(engine, placement[host][local]);
      });
    }
  }
  if (watch) watch(network);
  for (auto& thread : threads) thread.join();
}

inline void with_world(int size, const std::function<void(Engine&, int)>& body,
                       std::chrono::nanoseconds timeout = std::chrono::seconds(60), std::size_t arena_bytes = 0,
                       const Thresholds& thresholds = {}, const Inside& inside = {}) {
  with_hosts(placement_of(size), body, timeout, arena_bytes, thresholds, inside);
}

// A value that differs for every (rank, element, seed), with rounding errors worth comparing.
inline float value_of(int rank, std::size_t element, std::uint32_t seed = 0) {
  std::uint32_t hash = static_cast<std::uint32_t>(element) * 2654435761U ^ static_cast<std::uint32_t>(rank) * 40503U ^
                       seed * 2246822519U;
  hash ^= hash >> 13;
  hash *= 0x5bd1e995U;
  hash ^= hash >> 15;
  return static_cast<float>(static_cast<std::int32_t>(hash)) * 1e-7F;
}

// What a sum over all ranks is: that over hosts, in order, of the sums over each one's ranks, in order.
template <class Value>
float sum_over(const Placement& placement, const Value& value) {
  float sum = 0;
  for (std::size_t host = 0; host < placement.size(); ++host) {
    float of_host = 0;
    for (std::size_t r = 0; r < placement[host].size(); ++r) {
      const float one = value(placement[host][r]);
      of_host = r == 0 ? one : of_host + one;
    }
    sum = host == 0 ? of_host : sum + of_host;
  }
  return sum;
}

inline float sum_in_rank_order(int size, std::size_t element, std::uint32_t seed = 0) {
  static const std::vector<Placement> placements = [] {
    std::vector<Placement> all{{}};
    for (int n = 1; n <= kMaxRanks; ++n) all.push_back(placement_of(n));
    return all;
  }();
  return sum_over(placements[static_cast<std::size_t>(size)], [&](int rank) { return value_of(rank, element, seed); });
}

// Whether every element has the bits of what is expected for it.
inline bool same_bits(const std::vector<float>& data, const std::function<float(std::size_t)>& expected) {
  for (std::size_t i = 0; i < data.size(); ++i) {
    const float value = expected(i);
    if (std::memcmp(&value, &data[i], sizeof(value)) != 0) return false;
  }
  return true;
}

inline Request allreduce(const std::string& name, float* data, std::size_t count, int priority = 0) {
  Request request;
  request.name = name;
  request.label = "'" + name + "'";
  request.inputs = {data};
  request.outputs = {data};
  request.count = count;
  request.shape = {static_cast<std::int64_t>(count)};
  request.priority = priority;
  return request;
}

inline Request allreduce(const std::string& name, std::vector<float>& data, int priority = 0) {
  return allreduce(name, data.data(), data.size(), priority);
}

inline std::vector<float> values_of(int rank, std::size_t count, std::uint32_t seed = 0) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = value_of(rank, i, seed);
  return values;
}

// Joins the barrier of all ranks.
inline Status barrier(Engine& engine) {
  std::vector<float> nothing(1);
  return engine.run(allreduce("barrier", nothing));
}

}  // namespace kvstore_hvd
