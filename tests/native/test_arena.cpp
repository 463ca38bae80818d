// Arenas, and collectives on arrays that lie in them, with ranks as threads.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#include "check.hpp"
#include "ranks.hpp"
#include "reduce/reduce.hpp"
#include "shm/arena.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

using testing::check;

constexpr std::size_t kArena = std::size_t{64} << 20;

const bool allocator = testing::add("an arena hands out memory that never overlaps, and takes all of it back", [] {
  const auto segment = Segment::create(2, kArena);
  Arena arena(segment, 1);
  std::mt19937 random(7);
  std::map<char*, std::size_t> held;
  for (int step = 0; step < 20000; ++step) {
    if (held.empty() || random() % 5 < 3) {
      const std::size_t bytes = random() % (std::size_t{1} << (random() % 20));
      auto* memory = static_cast<char*>(arena.allocate(bytes));
      if (memory == nullptr) {
        check(arena.used() > kArena / 2, "full although half of it is free");
        continue;
      }
      check(reinterpret_cast<std::uintptr_t>(memory) % Arena::kAlignment == 0, "not aligned");
      check(arena.contains(memory) && (bytes == 0 || arena.contains(memory + bytes - 1)), "outside of the arena");
      const auto next = held.lower_bound(memory);
      check(next == held.end() || memory + bytes <= next->first, "overlaps the next");
      check(next == held.begin() || std::prev(next)->first + std::prev(next)->second <= memory,
            "overlaps the previous");
      held.emplace(memory, bytes);
    } else {
      auto victim = held.begin();
      std::advance(victim, random() % std::min<std::size_t>(held.size(), 50));
      arena.free(victim->first);
      held.erase(victim);
    }
  }
  for (const auto& [memory, bytes] : held) arena.free(memory);
  check(arena.used() == 0, "something is still in use");
  check(arena.allocate(kArena) != nullptr, "free neighbours were not joined");
  check(arena.allocate(1) == nullptr, "more than there is");
});

const bool none = testing::add("a world without arenas has nothing to hand out", [] {
  Arena arena(Segment::create(2), 0);
  check(arena.capacity() == 0 && arena.allocate(1) == nullptr && !arena.contains(&arena), "an arena");
});

// Elements of one rank: in its arena or elsewhere, as the seed says.
class Array {
 public:
  Array(Arena& arena, bool in_arena, std::vector<float> values)
      : arena_(arena), elsewhere_(std::move(values)), count_(elsewhere_.size()) {
    if (!in_arena) return;
    memory_ = static_cast<float*>(arena.allocate(count_ * sizeof(float)));
    std::copy(elsewhere_.begin(), elsewhere_.end(), memory_);
  }
  ~Array() {
    if (memory_ != nullptr) arena_.free(memory_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  float* data() { return memory_ != nullptr ? memory_ : elsewhere_.data(); }
  std::size_t count() const { return count_; }

 private:
  Arena& arena_;
  std::vector<float> elsewhere_;
  std::size_t count_;
  float* memory_ = nullptr;
};

void run_schedule(Engine& engine, Arena& arena, int rank, std::uint32_t seed) {
  constexpr int kTensors = 24;
  std::mt19937 common(seed), own(seed * 977 + static_cast<std::uint32_t>(rank));
  std::vector<std::unique_ptr<Array>> arrays;
  std::vector<int> order;
  for (int t = 0; t < kTensors; ++t) {
    const std::size_t count = common() % (std::size_t{1} << (common() % 20));
    // A third of the tensors everywhere in arenas, a third nowhere, a third here and there.
    const bool in_arena = t % 3 == 0 || (t % 3 == 1 && own() % 2 == 0);
    arrays.push_back(std::make_unique<Array>(arena, in_arena, values_of(rank, count, seed + t)));
    order.push_back(t);
  }
  std::shuffle(order.begin(), order.end(), own);
  std::vector<std::shared_ptr<Work>> works(kTensors);
  for (const int t : order) {
    if (own() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
    Request request;
    request.name = "t" + std::to_string(t);
    request.inputs = {arrays[t]->data()};
    request.outputs = {arrays[t]->data()};
    request.count = arrays[t]->count();
    request.shape = {static_cast<std::int64_t>(request.count)};
    request.priority = static_cast<int>(own() % 5);
    works[t] = own() % 8 == 0 ? engine.submit_to_wait(std::make_shared<Request>(std::move(request)))
                              : engine.submit(std::move(request));
  }
  std::shuffle(order.begin(), order.end(), own);
  for (const int t : order) {
    const Status& status = engine.wait(*works[t]);
    check(status.ok(), status.text());
    for (std::size_t i = 0; i < arrays[t]->count(); ++i) {
      const float expected = sum_in_rank_order(engine.size(), i, seed + t);
      if (std::memcmp(&expected, &arrays[t]->data()[i], sizeof(expected)) == 0) continue;
      check(false, "seed " + std::to_string(seed) + ": wrong bits in tensor " + std::to_string(t));
      break;
    }
    // Overwritten at once: a rank that is still reducing would see it.
    std::fill_n(arrays[t]->data(), arrays[t]->count(), -1.0F);
  }
}

const bool schedules = testing::add("seeded schedules in and out of arenas give the rank-ordered sum bit by bit", [] {
  const int runs = thread_sanitizer() ? 15 : 100;
  for (const int size : {1, 2, 3, 4, 7}) {
    with_world(
        size,
        [&](Engine& engine, int rank) {
          Arena arena(engine.segment(), engine.local_rank());
          for (int run = 0; run < runs; ++run) {
            run_schedule(engine, arena, rank, static_cast<std::uint32_t>(size * 1000 + run));
          }
          check(barrier(engine).ok(), "barrier");
        },
        std::chrono::seconds(60), kArena);
  }
});

unsigned char byte_of(int rank, std::size_t i) {
  return static_cast<unsigned char>((i * 7 + static_cast<std::size_t>(rank) * 13) % 64);
}

// Runs the request on bytes that differ from rank to rank, in place at `data`, and compares with one reduction.
void check_against_reduction(Engine& engine, int rank, Request request, unsigned char* data) {
  const std::size_t bytes = request.count * size_of(request.dtype);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = byte_of(rank, i);
  request.inputs = {data};
  request.outputs = {data};
  const Status status = engine.run(request);
  check(status.ok(), status.text());

  std::vector<std::vector<unsigned char>> all(static_cast<std::size_t>(engine.size()));
  std::vector<const void*> inputs;
  for (int r = 0; r < engine.size(); ++r) {
    all[r].resize(bytes);
    for (std::size_t i = 0; i < bytes; ++i) all[r][i] = byte_of(r, i);
    inputs.push_back(all[r].data());
  }
  std::vector<unsigned char> expected(bytes);
  const double postscale = request.op == ReduceOp::kAverage ? 1.0 / engine.size() : 1.0;
  reduce_over(placement_of(engine.size()),
              Reduction{request.dtype, request.op, request.prescale, postscale, request.as_half}, inputs,
              expected.data(), request.count);
  check(std::memcmp(data, expected.data(), bytes) == 0, "wrong " + request.name);
}

const bool every_type = testing::add("every dtype and op in arenas equals one reduction over all ranks' arrays", [] {
  constexpr std::size_t kCount = 50021;
  for (const int size : {2, 3}) {
    with_world(
        size,
        [&](Engine& engine, int rank) {
          Arena arena(engine.segment(), engine.local_rank());
          for (int d = 0; d < kDTypes; ++d) {
            for (int o = 0; o < kReduceOps; ++o) {
              Request request;
              request.dtype = static_cast<DType>(d);
              request.op = static_cast<ReduceOp>(o);
              request.name = std::string(name_of(request.dtype)) + name_of(request.op);
              request.count = kCount;
              request.shape = {kCount};
              request.prescale = o == 0 ? 0.5 : 1.0;
              auto* data = static_cast<unsigned char*>(arena.allocate(kCount * size_of(request.dtype)));
              check_against_reduction(engine, rank, request, data);
              if (can_be_half(request.dtype, request.op)) {
                request.as_half = true;
                check_against_reduction(engine, rank, request, data);
                std::vector<unsigned char> elsewhere(kCount * size_of(request.dtype));
                check_against_reduction(engine, rank, request, elsewhere.data());
              }
              arena.free(data);
            }
          }
        },
        std::chrono::seconds(60), kArena);
  }
});

const bool forked = testing::add("a forked child has a copy of all that was allocated, however much came last", [] {
  if (thread_sanitizer()) return;
  const auto segment = Segment::create(1, std::size_t{8} << 20);
  Arena arena(segment, 0);
  std::vector<char*> blocks;
  for (const std::size_t bytes : {std::size_t{1} << 20, std::size_t{1} << 20, std::size_t{64}}) {
    blocks.push_back(static_cast<char*>(arena.allocate(bytes)));
    blocks.back()[bytes - 1] = static_cast<char>(blocks.size());
  }
  const pid_t child = fork();
  if (child == 0) {
    arena.after_fork_in_child();
    const bool same = blocks[0][(1 << 20) - 1] == 1 && blocks[1][(1 << 20) - 1] == 2 && blocks[2][63] == 3;
    blocks[2][63] = 7;
    _exit(same ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child reads what there was");
  check(blocks[2][63] == 3, "the parent does not see what it writes");
});

const bool dropped = testing::add("a forked child that drops the segment keeps what lies in its place", [] {
  if (thread_sanitizer()) return;
  auto segment = Segment::create(1, 1);
  const pid_t child = fork();
  if (child == 0) {
    // Nothing of the segment is there, so the system may give the child this memory.
    void* place = mmap(&segment->world(), 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (place == MAP_FAILED) _exit(1);
    std::memset(place, 7, 4096);
    segment.reset();
    _exit(static_cast<char*>(place)[4095] == 7 ? 0 : 2);
  }
  int status = 0;
  waitpid(child, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child: " + std::to_string(status));
});

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }
