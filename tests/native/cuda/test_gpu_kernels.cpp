// The kernels under random schedules of fibers: random operations, the copies, the operations that the host orders, the
// sizes that the kernels report; and ranks that do not come: the others leave in bounded time and say whom they waited
// for, and after a reset all is well.
#include "host/fibers.hpp"
#include "streams.hpp"

namespace kvstore_hvd::gpu::tests {
namespace {

const bool registered =
    testing::add("schedules: random operations", [] { run_seeds<host::Fibers>({1, 2, 3, 4, 8}, 5.0, Limits()); });

// Runs a kernel of one rank.
void run_alone(u64 seed, u32 threads_of_block, u32 n_blocks, const std::function<void()>& kernel) {
  host::Fibers machine(seed);
  check(machine.run([&](u32) { return n_blocks; }, 1, threads_of_block, [&](u32) { kernel(); }), "every thread waits");
}

struct Cast {
  DType tensor;
  DType fused;
  bool raw;
};

// One element as a cast must give it.
u64 converted(DType from, DType to, u64 bits, double scale) {
  if (from == to) {
    // Of two, as a single one might be copied.
    Bytes one(size_of(from));
    reduce_tests::set_element(from, one, 0, bits);
    return reduce_tests::element(from, reduced(Reduction{from, ReduceOp::kMax, scale}, {one, one}, 1), 0);
  }
  const double value = reduce_tests::number_of(from, bits);
  if (from != DType::kFloat64 && to != DType::kFloat64) {
    return reduce_tests::bits_of(to, static_cast<double>(static_cast<float>(value) * static_cast<float>(scale)));
  }
  const double product = value * scale;
  return reduce_tests::bits_of(to, to == DType::kFloat64 ? product : static_cast<double>(static_cast<float>(product)));
}

void check_copy(const std::string& name, const Cast& cast, u64 seed) {
  std::mt19937_64 random(seed);
  const std::size_t tensor_size = cast.raw ? 1 : size_of(cast.tensor);
  const std::size_t fused_size = cast.raw ? 1 : size_of(cast.fused);
  const double scales[] = {1.0, 0.25, 1.0 / 3.0, 1e-39};
  const double scale = cast.raw ? 1.0 : scales[draw(random, 4)];
  const u32 tensors = 1 + draw(random, 6);
  const bool pack = draw(random, 2) == 0;
  const DType from = pack ? cast.tensor : cast.fused;
  const DType to = pack ? cast.fused : cast.tensor;
  std::vector<std::size_t> counts;
  std::vector<u64> offsets;
  u64 total = 0;
  for (u32 i = 0; i < tensors; ++i) {
    counts.push_back(draw(random, 5) == 0 ? 0 : draw(random, 300));
    offsets.push_back(total);
    total += (counts[i] + 15) / 16 * 16 + (cast.raw ? draw(random, 3) : 0);
  }
  Array fused(total * fused_size, 0);
  const Bytes before = reduce_tests::random_array(cast.raw ? DType::kUInt8 : cast.fused, total, random);
  fused.set(before);
  Bytes expected_fused = before;
  std::vector<std::unique_ptr<Array>> arrays;
  std::vector<Bytes> expected;
  Table table(1, tensors);
  for (u32 i = 0; i < tensors; ++i) {
    const Bytes content = reduce_tests::random_array(cast.raw ? DType::kUInt8 : cast.tensor, counts[i], random);
    const std::size_t shift = draw(random, 2) == 0 ? draw(random, 16) * tensor_size : 0;
    arrays.push_back(std::make_unique<Array>(counts[i] * tensor_size, shift));
    arrays[i]->set(content);
    expected.push_back(content);
    table.set(0, i, arrays[i]->data(), offsets[i], counts[i]);
    for (std::size_t k = 0; k < counts[i]; ++k) {
      const std::size_t source = pack ? k : offsets[i] + k, target = pack ? offsets[i] + k : k;
      const u64 bits = reduce_tests::element(from, pack ? content : before, source);
      Bytes& result = pack ? expected_fused : expected[i];
      reduce_tests::set_element(to, result, target, converted(from, to, bits, cast.raw ? 1.0 : scale));
    }
  }
  Copy copy = {};
  copy.segments = table.finish(cast.raw ? kTileBytes : kTileElements);
  copy.n_segments = tensors;
  copy.buffer = fused.data();
  copy.scale = scale;
  copy.scale32 = static_cast<float>(scale);
  copy.into_buffer = pack ? 1 : 0;
  run_alone(seed, 1 + draw(random, 8), 1 + draw(random, 4), [&] { kernel_named<CopyKernel>(name)(copy); });
  const std::string what = name + (pack ? " packs" : " unpacks") + ", scale " + std::to_string(scale) + ", seed " +
                           std::to_string(seed) + ": ";
  check(fused.content() == expected_fused && fused.guarded(), what + "the buffer is wrong");
  for (u32 i = 0; i < tensors; ++i) {
    check(arrays[i]->content() == expected[i] && arrays[i]->guarded(), what + "tensor " + std::to_string(i));
  }
}

const bool copies = testing::add("copies pack and unpack tensors of any length and alignment", [] {
  for (u64 seed = 1; seed <= 200; ++seed) {
    check_copy("kvhvd_copy", {DType::kUInt8, DType::kUInt8, true}, seed);
    for (int tensor = 0; tensor < kDTypes; ++tensor) {
      for (int fused = 0; fused < kDTypes; ++fused) {
        const Cast cast = {static_cast<DType>(tensor), static_cast<DType>(fused), false};
        const std::string name = std::string("kvhvd_copy_") + name_of(cast.tensor) + "_" + name_of(cast.fused);
        if (kernel_named<CopyKernel>(name) != nullptr) check_copy(name, cast, seed);
      }
    }
  }
});

const bool ordered = testing::add("one launch reduces the staging memory of all ranks, which the host has ordered", [] {
  for (u64 seed = 1; seed <= 200; ++seed) {
    std::mt19937_64 random(seed);
    const u32 n = 1 + draw(random, 8);
    const Reduction reduction = never_a_copy(random_reduction(random, false), n);
    const std::size_t count = draw(random, 600);
    const std::size_t bytes = count * size_of(reduction.dtype);
    const std::vector<Bytes> values = contributions(reduction, n, count, false, random);
    const Bytes result = reduced(reduction, values, count);
    Ranks ranks(n, 8, rounded(bytes) + 16, 1);
    Launch launch = launch_of(reduction, 1);
    launch.meet = 0;
    launch.staging_offset = rounded(bytes) + 16;
    for (u32 rank = 0; rank < n; ++rank) {
      std::copy(values[rank].begin(), values[rank].end(), ranks.staging(rank) + launch.staging_offset);
    }
    launch.bytes = bytes;
    const u32 threads_of_block = 1 + draw(random, 8);
    const u32 n_blocks = 1 + draw(random, 6);
    const bool by_one = draw(random, 2) == 0;
    const std::string what = "ordered " + reduce_tests::describe(reduction, n, count) + ": ";
    if (by_one) {
      const MeetingKernel kernel = kernel_named<MeetingKernel>(allreduce_name("twoshot", reduction, n));
      run_alone(seed, threads_of_block, n_blocks, [&] { kernel(ranks.worlds(), launch); });
      for (u32 rank = 0; rank < n; ++rank) {
        const u8* staging = ranks.staging(rank) + launch.staging_offset;
        check(Bytes(staging, staging + bytes) == result, what + "rank " + std::to_string(rank) + " is wrong");
      }
    } else {
      Array output(bytes, 0);
      Table table(1, 1);
      table.set(0, 0, output.data(), 0, bytes);
      launch.outputs = table.finish(kTileBytes);
      launch.n_outputs = 1;
      const MeetingKernel kernel = kernel_named<MeetingKernel>(allreduce_name("oneshot", reduction, n));
      const World* world = ranks.worlds() + draw(random, n);
      run_alone(seed, threads_of_block, n_blocks, [&] { kernel(world, launch); });
      check(output.content() == result && output.guarded(), what + "wrong");
    }
  }
});

const bool sizes = testing::add("sizes", [] {
  u32 reported[10] = {};
  run_alone(1, 4, 1, [&] { kvhvd_sizes(reported); });
  check(reported[0] == sizeof(Segment) && reported[0] == 32, "Segment");
  check(reported[1] == sizeof(World) && reported[1] == 416, "World");
  check(reported[2] == sizeof(Launch) && reported[2] == 80, "Launch");
  check(reported[3] == sizeof(Copy) && reported[3] == 40, "Copy");
  check(reported[4] == sizeof(Control) && reported[4] == 27136, "Control");
  check(reported[5] == kMaxRanks && reported[6] == kMaxChannels && reported[7] == kSlots, "limits");
});

struct Stop {
  u32 cause, rank, awaited, place;
  explicit Stop(u32 word) : cause(word & 255), rank(word >> 8 & 255), awaited(word >> 16 & 255), place(word >> 24) {}
};

std::unique_ptr<Operation> random_operation(Ranks& ranks, std::mt19937_64& random, u32 kind, u64 timeout_ns) {
  // A ring of long arrays: its ranks use the slots of a FIFO more than once.
  if (kind == 0) return std::make_unique<Reduced>(ranks, "ring", random, 3000, timeout_ns);
  if (kind == 1) return std::make_unique<Exchange>(ranks, random, 500, timeout_ns);
  return std::make_unique<Reduced>(ranks, kind == 2 ? "oneshot" : "twoshot", random, 500, timeout_ns);
}

// Runs `operation` on all ranks but `absent`; what that one does instead is `otherwise`, on its first thread.
bool run_without(u32 absent, const Operation& operation, u32 n, u64 seed, const std::function<void()>& otherwise) {
  host::Fibers machine(seed, true);
  return machine.run([](u32) { return 2; }, n, 3,
                     [&](u32 rank) {
                       if (rank != absent) {
                         operation.run();
                       } else if (block() == 0 && thread() == 0) {
                         otherwise();
                       }
                     });
}

void check_afterwards(Ranks& ranks, std::mt19937_64& random) {
  ranks.reset(static_cast<u32>(random()));
  std::vector<std::unique_ptr<Operation>> operations;
  for (u32 kind = 0; kind < 4; ++kind) operations.push_back(random_operation(ranks, random, kind, u64{1} << 62));
  host::Fibers machine(random());
  check(run_streams(machine, operations, std::vector<u32>(ranks.size(), 2), 3), "every thread waits after a reset");
  for (const auto& operation : operations) operation->is_right();
  for (u32 rank = 0; rank < ranks.size(); ++rank) check(ranks.status(rank) == 0, "a status after a reset");
}

// Has ranks stop in `attempt`, as many seeds for several numbers of ranks; one failure tells enough.
void try_seeds(u64 seeds, const std::function<void(u64, Ranks&, std::mt19937_64&)>& attempt) {
  for (u64 seed = 1; seed <= seeds && testing::failures.load(std::memory_order_relaxed) == 0; ++seed) {
    for (const u32 n : {2, 3, 4, 8}) {
      std::mt19937_64 random(seed);
      Ranks ranks(n, 8, 4096, 2);
      attempt(seed, ranks, random);
      check_afterwards(ranks, random);
    }
  }
}

const bool timeouts = testing::add("stops: a rank that does not come is named", [] {
  try_seeds(30, [](u64 seed, Ranks& ranks, std::mt19937_64& random) {
    const u32 n = ranks.size();
    const u32 kind = draw(random, 4);
    const auto operation = random_operation(ranks, random, kind, 200'000);
    const u32 absent = draw(random, n);
    const std::string what = operation->what() + ", seed " + std::to_string(seed) + ": ";
    check(run_without(absent, *operation, n, seed, [] {}), what + "some thread waits without end");
    bool stopped = kind == 0;  // of an empty array nobody waits
    for (u32 rank = 0; rank < n; ++rank) {
      if (rank == absent || ranks.status(rank) == 0) continue;
      stopped = true;
      const Stop stop(ranks.status(rank));
      check(stop.cause == kTimeout && stop.rank != absent && stop.rank < n, what + "wrong cause");
      // A rank of a ring may wait for one that waits for the absent one.
      if (kind == 0) {
        const bool neighbour = stop.awaited == (stop.rank + 1) % n || stop.rank == (stop.awaited + 1) % n;
        check(neighbour && (stop.place == kFilledSlot || stop.place == kFreeSlot), what + "wrong neighbour");
      } else {
        check(stop.awaited == absent && stop.place == kStart, what + "the wrong rank is awaited");
      }
    }
    check(stopped, what + "nobody stopped");
  });
});

const bool aborts = testing::add("stops: the host's abort word ends the kernels of all ranks", [] {
  try_seeds(30, [](u64 seed, Ranks& ranks, std::mt19937_64& random) {
    const u32 n = ranks.size();
    const u32 kind = 1 + draw(random, 3);
    const auto operation = random_operation(ranks, random, kind, u64{1} << 62);
    const u32 absent = draw(random, n);
    const u32 aborted = (absent + 1 + draw(random, n - 1)) % n;
    const u32 after = draw(random, 200);
    const std::string what = operation->what() + ", seed " + std::to_string(seed) + ": ";
    const bool ended = run_without(absent, *operation, n, seed, [&] {
      for (u32 i = 0; i < after; ++i) pause();
      store_relaxed(&ranks.abort(aborted), 1);
    });
    check(ended, what + "some thread waits without end");
    for (u32 rank = 0; rank < n; ++rank) {
      if (rank == absent) continue;
      const Stop stop(ranks.status(rank));
      check(stop.cause == kAborted && stop.rank == aborted, what + "wrong status");
    }
  });
});

const bool together = testing::add("stops: ranks that are aborted or slow in the middle of anything leave", [] {
  try_seeds(150, [](u64 seed, Ranks& ranks, std::mt19937_64& random) {
    const u32 n = ranks.size();
    const auto operation = random_operation(ranks, random, draw(random, 4), 200 + draw(random, 20000));
    const bool by_host = draw(random, 2) == 0;
    u32 turns = draw(random, 400);
    // With one block nobody else notices for it that its rank has stopped.
    const u32 blocks_of_rank = 1 + draw(random, 2);
    const u32 threads_of_block = 1 + draw(random, 4);
    host::Fibers machine(seed);
    const bool ended = machine.run([&](u32) { return blocks_of_rank; }, n, threads_of_block,
                                   [&](u32 rank) {
                                     if (by_host && rank == 0 && block() == 0 && thread() == 0) {
                                       for (; turns > 0; --turns) pause();
                                       store_relaxed(&ranks.abort(0), 1);
                                     }
                                     operation->run();
                                   });
    const std::string what = operation->what() + ", seed " + std::to_string(seed) + ": ";
    check(ended, what + "some thread waits without end");
    for (u32 rank = 0; rank < n; ++rank) {
      if (ranks.status(rank) != 0) continue;
      operation->ended(rank);
      check(operation->is_right(rank), what + "a rank that did not stop has no result");
    }
  });
});

}  // namespace
}  // namespace kvstore_hvd::gpu::tests
