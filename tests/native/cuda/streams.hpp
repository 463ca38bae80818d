// Random sequences of operations, launched as streams launch them, on either machine.
#pragma once

#include <chrono>

#include "operations.hpp"

namespace kvstore_hvd::gpu::tests {

// Runs the operations one after another on every rank. A rank's next kernel begins when all blocks of its last one
// have ended, wherever the other ranks are.
template <class Machine>
bool run_streams(Machine& machine, const std::vector<std::unique_ptr<Operation>>& operations,
                 const std::vector<u32>& blocks, u32 threads_of_block) {
  const u32 n = static_cast<u32>(blocks.size());
  std::vector<std::vector<std::atomic<u32>>> ended(operations.size());
  for (auto& of_operation : ended) of_operation = std::vector<std::atomic<u32>>(n);
  return machine.run([&](u32 rank) { return blocks[rank]; }, n, threads_of_block,
                     [&](u32 rank) {
                       const u32 all = blocks[rank] * threads_of_block;
                       for (std::size_t i = 0; i < operations.size(); ++i) {
                         operations[i]->run();
                         // One count for those that have ended, and one for what the stream does then.
                         if (ended[i][rank].fetch_add(1, std::memory_order_acq_rel) + 1 == all) {
                           operations[i]->ended(rank);
                           ended[i][rank].store(all + 1, std::memory_order_release);
                         }
                         while (ended[i][rank].load(std::memory_order_acquire) != all + 1) pause();
                       }
                     });
}

struct Limits {
  u64 bytes = 1500;
  u32 threads = 8;
  u32 blocks = 3;
  u32 operations = 4;
  u64 timeout_ns = u64{1} << 62;
};

// What one seed means. Returns whether everything was right; says what was not.
template <class Machine>
bool run_seed(u32 n, u64 seed, const Limits& limits) {
  std::mt19937_64 random(seed);
  Ranks ranks(n, 8 * (1 + draw(random, 2)), 2 * rounded(limits.bytes), limits.blocks);
  std::vector<std::unique_ptr<Operation>> operations;
  bool around = false;
  for (u32 left = 1 + draw(random, limits.operations); left > 0; --left) {
    const u64 bytes = 64 + draw(random, static_cast<u32>(limits.bytes - 64));
    const u32 kind = draw(random, n > 1 ? 5 : 3);  // a ring has neighbours
    const char* const algorithm = kind == 0 ? "oneshot" : kind == 1 ? "twoshot" : "ring";
    around = around || kind > 2;
    if (kind == 2) {
      operations.push_back(std::make_unique<Exchange>(ranks, random, bytes, limits.timeout_ns));
    } else {
      operations.push_back(std::make_unique<Reduced>(ranks, algorithm, random, bytes, limits.timeout_ns));
    }
  }
  // A ring has as many blocks on every rank; else ranks may differ.
  std::vector<u32> blocks;
  for (u32 rank = 0; rank < n; ++rank) {
    blocks.push_back(around && rank > 0 ? blocks[0] : 1 + draw(random, limits.blocks));
  }
  Machine machine(random());
  const u32 threads_of_block = 1 + draw(random, limits.threads);
  bool right = check(run_streams(machine, operations, blocks, threads_of_block), "every thread waits");
  for (u32 rank = 0; rank < n; ++rank) {
    right = check(ranks.status(rank) == 0, "status " + std::to_string(ranks.status(rank))) && right;
  }
  for (const auto& operation : operations) right = right && operation->is_right();
  if (!right) {
    std::string names;
    for (const auto& operation : operations) names += "\n    " + operation->what();
    check(false, std::to_string(n) + " ranks, seed " + std::to_string(seed) + ", " + std::to_string(threads_of_block) +
                     " threads, " + std::to_string(blocks[0]) + " blocks:" + names);
  }
  return right;
}

inline double variable(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atof(text);
}

// Seeds from KVHVD_TEST_SEED (1) on, for every number of ranks in turn, for KVHVD_TEST_SECONDS or until a failure.
template <class Machine>
void run_seeds(const std::vector<u32>& sizes, double seconds, const Limits& limits) {
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(variable("KVHVD_TEST_SECONDS", seconds));
  u64 seed = static_cast<u64>(variable("KVHVD_TEST_SEED", 1));
  u64 schedules = 0;
  bool right = true;
  do {
    for (const u32 n : sizes) {
      right = right && run_seed<Machine>(n, seed, limits);
      ++schedules;
    }
    ++seed;
  } while (right && std::chrono::steady_clock::now() < end);
  std::printf("%llu schedules\n", static_cast<unsigned long long>(schedules));
}

}  // namespace kvstore_hvd::gpu::tests
