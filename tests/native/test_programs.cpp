// Random programs: operations of all kinds that all ranks derive from a seed, each submits in an order of its own, from
// its arena or from elsewhere. Results have the bits of the sum over hosts of the sums over their ranks, whatever
// travels with what.
//
// KVHVD_TEST_PROGRAMS: how many for each world.
#include <memory>

#include "ranks.hpp"
#include "shm/arena.hpp"

namespace kvstore_hvd {
namespace {

struct Step {
  Collective collective;
  std::string name;
  std::size_t count;
  int root;
  int odd_one;  // the rank that submits another number of elements, or -1
  bool is_in_place;
  unsigned weights;  // how the ranks weigh in an average; 0: it is a sum
  std::size_t given, received;
  std::shared_ptr<float> input, output;
  std::shared_ptr<float> second;  // of another device, in place
  std::shared_ptr<Work> work;

  // Elements that go from one rank to those before another one in an exchange.
  std::size_t sent_before(std::size_t from, std::size_t to) const {
    std::size_t sent = 0;
    for (std::size_t r = 0; r < to; ++r) sent += (from + r) % 3 * count;
    return sent;
  }
  double weight_of(std::size_t rank, std::size_t size) const {
    return weights == 1 ? 0.5 + static_cast<double>(rank) : weights == 2 && rank + 1 == size ? 3.0 : 0.0;
  }
};

// In the arena, if there is room.
std::shared_ptr<float> array_of(Arena& arena, bool in_arena, std::size_t count) {
  auto* const memory = in_arena ? static_cast<float*>(arena.allocate(count * sizeof(float))) : nullptr;
  if (memory == nullptr) return {new float[count], std::default_delete<float[]>()};
  return {memory, [&arena](float* it) { arena.free(it); }};
}

std::vector<Step> steps_of(std::mt19937& all, unsigned size, std::size_t largest) {
  constexpr Collective kKinds[]{Collective::kAllreduce, Collective::kAllreduce, Collective::kAllreduce,
                                Collective::kBroadcast, Collective::kExchange,  Collective::kReduceScatter};
  constexpr std::size_t kBorders[]{0, 1, 3, 15, 16, 17, 511, 512, 513, 1024, 1025, 16384, 100003, 1 << 20};
  std::vector<Step> steps(1 + all() % 24);
  const bool are_gradients = all() % 2 == 0;  // all summed in place, so that several travel together
  for (std::size_t i = 0; i < steps.size(); ++i) {
    Step& one = steps[i];
    one.collective = are_gradients ? Collective::kAllreduce : kKinds[all() % 6];
    one.name = "t" + std::to_string(i);
    const std::size_t border = kBorders[all() % 14], any = all() % (1U << (are_gradients ? 15 : all() % 18));
    one.count = std::min(all() % 4 == 0 ? border : any, largest);
    one.root = static_cast<int>(all() % size);
    one.odd_one = all() % 10 == 0 && size > 1 ? static_cast<int>(all() % size) : -1;
    const bool may_be = one.collective == Collective::kAllreduce || one.collective == Collective::kBroadcast;
    one.is_in_place = are_gradients || (all() % 2 == 0 && may_be);
    one.weights = one.collective == Collective::kAllreduce && all() % 3 == 0 ? 1 + all() % 3 : 0;
    if (one.collective == Collective::kExchange) one.count /= 4;
  }
  return steps;
}

void run_program(Engine& engine, Arena& arena, int rank, const Placement& placement, std::uint32_t seed,
                 std::size_t largest) {
  const auto size = static_cast<std::size_t>(engine.size()), place = static_cast<std::size_t>(rank);
  std::mt19937 all(seed), own(seed * 977 + static_cast<std::uint32_t>(rank));
  std::vector<Step> steps = steps_of(all, static_cast<unsigned>(size), largest);
  std::vector<std::size_t> order(steps.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), own);
  for (const std::size_t i : order) {
    Step& one = steps[i];
    if (rank == one.odd_one) ++one.count;
    one.given = one.received = one.count;
    const auto tensor = static_cast<std::uint32_t>(i);
    // A third of the tensors everywhere in arenas, a third nowhere, a third here and there.
    const bool in_arena = i % 3 == 0 || (i % 3 == 1 && own() % 4 != 0);
    std::vector<Part> parts;
    if (one.collective == Collective::kExchange) {
      one.given = one.sent_before(place, size);
      one.received = 0;
      for (std::size_t r = 0; r < size; ++r) {
        const std::size_t begin = one.sent_before(r, place), n = one.sent_before(r, place + 1) - begin;
        parts.push_back(Part{static_cast<int>(r), 4 * begin, 4 * n, 4 * one.received});
        one.received += n;
      }
    } else if (one.collective == Collective::kReduceScatter) {
      const std::size_t begin = 4 * (one.count * place / size), end = 4 * (one.count * (place + 1) / size);
      parts = {Part{rank, begin, end - begin, begin}};
    }
    one.input = array_of(arena, in_arena, one.given);
    for (std::size_t e = 0; e < one.given; ++e) one.input.get()[e] = value_of(rank, e, tensor);
    one.output = one.is_in_place ? one.input : array_of(arena, in_arena, one.received);
    if (!one.is_in_place) std::fill_n(one.output.get(), one.received, -1.0F);
    Request request = allreduce(one.name, one.input.get(), one.given, static_cast<int>(own() % 3));
    request.collective = one.collective;
    request.outputs = {one.output.get()};
    request.contributed = one.given;
    if (one.collective == Collective::kExchange) {
      for (std::size_t r = 0; r < size; ++r) request.count = std::max(request.count, one.sent_before(r, size));
    }
    request.shape = {static_cast<std::int64_t>(request.count)};
    if (one.collective == Collective::kBroadcast) request.root = one.root;
    request.parts = parts;
    if (one.weights > 0) {
      request.op = ReduceOp::kAverage;
      request.weight = one.weight_of(place, size);
    }
    if (one.collective == Collective::kAllreduce && one.is_in_place && i % 4 == 0) {
      one.second = array_of(arena, in_arena, one.count);
      std::fill_n(one.second.get(), one.count, static_cast<float>(i));
      request.inputs.push_back(one.second.get());
      request.outputs.push_back(one.second.get());
    }
    if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
    one.work = own() % 8 == 0 ? engine.submit_to_wait(std::make_shared<Request>(std::move(request)))
                              : engine.submit(std::move(request));
  }
  std::shuffle(order.begin(), order.end(), own);
  for (const std::size_t i : order) {
    const Step& one = steps[i];
    const auto tensor = static_cast<std::uint32_t>(i);
    const Status status = engine.wait(*one.work);
    const std::string what = "program " + std::to_string(seed) + ", " + one.name + ": " + status.text();
    const bool fails = one.odd_one >= 0;
    check(fails ? status.code() == ErrorCode::kMismatch : status.ok(), what);
    double weights = 0.0;
    for (std::size_t r = 0; r < size; ++r) weights += one.weight_of(r, size);
    const auto scale = static_cast<float>(weights == 0.0 ? 1.0 : 1.0 / weights);
    const float second = one.second ? static_cast<float>(i) : 0.0F;
    std::vector<float> expected;
    for (std::size_t r = 0; !fails && one.collective == Collective::kExchange && r < size; ++r) {
      for (std::size_t e = one.sent_before(r, place); e < one.sent_before(r, place + 1); ++e) {
        expected.push_back(value_of(static_cast<int>(r), e, tensor));
      }
    }
    for (std::size_t e = expected.size(); e < one.received; ++e) {
      expected.push_back(fails ? (one.is_in_place ? value_of(rank, e, tensor) : -1.0F)
                         : one.collective == Collective::kBroadcast
                             ? value_of(one.root, e, tensor)
                             : sum_over(placement, [&](int r) { return value_of(r, e, tensor) + second; }) * scale);
    }
    std::size_t from = 0, to = one.received;
    if (!fails && one.collective == Collective::kReduceScatter) {
      from = one.count * place / size;
      to = one.count * (place + 1) / size;
    }
    const std::size_t bytes = (to - from) * sizeof(float);
    check(bytes == 0 || std::memcmp(expected.data() + from, one.output.get() + from, bytes) == 0, what);
    if (one.second) {
      if (fails) std::fill(expected.begin(), expected.end(), second);
      check(bytes == 0 || std::memcmp(expected.data(), one.second.get(), bytes) == 0, what + ", the second device");
      std::fill_n(one.second.get(), one.count, -2.0F);
    }
    // At once: a rank that is still reducing would see it.
    std::fill_n(one.input.get(), one.given, -2.0F);
    std::fill_n(one.output.get(), one.received, -2.0F);
  }
}

void run_programs(const Placement& placement, int programs, const Thresholds& thresholds = {},
                  std::size_t largest = 1 << 20) {
  const char* const text = std::getenv("KVHVD_TEST_PROGRAMS");
  if (text != nullptr) programs = std::atoi(text);
  const auto body = [&](Engine& engine, int rank) {
    Arena arena(engine.segment(), engine.local_rank());
    for (int i = 0; i < programs; ++i) {
      run_program(engine, arena, rank, placement, static_cast<std::uint32_t>(i), largest);
    }
    check(barrier(engine).ok(), "barrier");
    engine.shutdown();
  };
  with_hosts(placement, body, std::chrono::seconds(60), largest < (1 << 20) ? 0 : std::size_t{16} << 20, thresholds);
}

const bool on_one_host = testing::add("on one host, of any size", [] {
  for (const int size : {1, 2, 3, 4, 7}) {
    Placement placement(1);
    for (int rank = 0; rank < size; ++rank) placement[0].push_back(rank);
    // The smallest go one of these ways in worlds of many ranks, or with other thresholds.
    for (const char* thresholds : {"", "inlined=0,one_shot=4096", "inlined=0,one_shot=0"}) {
      run_programs(placement, thread_sanitizer() ? 3 : 15, parse_thresholds(thresholds));
    }
  }
});

const bool over_hosts = testing::add("over hosts", [] {
  const std::vector<Placement> placements{
      {{0}, {1}}, {{0, 1}, {2, 3}}, {{0, 2}, {1}, {3}}, {{0, 1}, {2}, {3, 4, 5, 6}}};
  for (const Placement& placement : placements) run_programs(placement, thread_sanitizer() ? 8 : 30);
});

const bool many_ranks = testing::add("64 ranks on few cores", [] {
  if (thread_sanitizer()) return;  // hundreds of threads take it minutes, and add no interleaving
  for (const std::size_t hosts : {1, 4}) {
    Placement placement(hosts);
    for (int rank = 0; rank < 64; ++rank) placement[static_cast<std::size_t>(rank) % hosts].push_back(rank);
    run_programs(placement, 1, {}, 5000);
  }
});

}  // namespace
}  // namespace kvstore_hvd
