// Worlds for tests: ranks as threads of this process, on one mapping, so that ThreadSanitizer sees all of their
// accesses.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "engine/engine.hpp"

namespace kvstore_hvd {

// Tests leave out what it cannot run, or what would take it minutes.
constexpr bool thread_sanitizer() {
#if defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}

inline EngineOptions thread_options(std::chrono::nanoseconds timeout = std::chrono::seconds(60)) {
  EngineOptions options;
  options.timeout = timeout;
  options.watch_peers = false;
  options.host = "testhost";
  return options;
}

// Runs `body(engine, rank)` on every rank of a fresh world.
inline void with_world(const std::shared_ptr<Segment>& segment, const std::function<void(Engine&, int)>& body,
                       std::chrono::nanoseconds timeout = std::chrono::seconds(60)) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < segment->size(); ++rank) {
    threads.emplace_back([&, rank] {
      Engine engine(segment, rank, thread_options(timeout));
      body(engine, rank);
    });
  }
  for (auto& thread : threads) thread.join();
}

inline void with_world(int size, const std::function<void(Engine&, int)>& body,
                       std::chrono::nanoseconds timeout = std::chrono::seconds(60), std::size_t arena_bytes = 0) {
  with_world(Segment::create(size, arena_bytes), body, timeout);
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

inline float sum_in_rank_order(int size, std::size_t element, std::uint32_t seed = 0) {
  float sum = value_of(0, element, seed);
  for (int rank = 1; rank < size; ++rank) sum += value_of(rank, element, seed);
  return sum;
}

// Whether every element has the bits of what is expected for it.
inline bool same_bits(const std::vector<float>& data, const std::function<float(std::size_t)>& expected) {
  for (std::size_t i = 0; i < data.size(); ++i) {
    const float value = expected(i);
    if (std::memcmp(&value, &data[i], sizeof(value)) != 0) return false;
  }
  return true;
}

inline Request allreduce(const std::string& name, std::vector<float>& data, int priority = 0) {
  Request request;
  request.name = name;
  request.label = "'" + name + "'";
  request.inputs = {data.data()};
  request.outputs = {data.data()};
  request.count = data.size();
  request.shape = {static_cast<std::int64_t>(data.size())};
  request.priority = priority;
  return request;
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
