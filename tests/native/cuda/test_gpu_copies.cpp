// The copies, the operations that the host orders, and the sizes that the kernels report.
#include "host/fibers.hpp"
#include "streams.hpp"

namespace kvstore_hvd::gpu::tests {
namespace {

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

double value_of(DType dtype, const u8* from) {
  u64 bits = 0;
  std::memcpy(&bits, from, size_of(dtype));
  float single = 0;
  double wide = 0;
  std::memcpy(&single, &bits, sizeof(single));
  std::memcpy(&wide, &bits, sizeof(wide));
  switch (dtype) {
    case DType::kFloat16:
      return reduce_tests::decode(static_cast<unsigned>(bits), 5, 10);
    case DType::kBFloat16:
      return reduce_tests::decode(static_cast<unsigned>(bits), 8, 7);
    case DType::kFloat32:
      return single;
    default:
      return wide;
  }
}

// One element as a cast must give it.
Bytes converted_element(DType from, DType to, const u8* element, double scale) {
  if (from == to) {
    // One input: the CPU engine's reduction scales and rounds it.
    Reduction reduction;
    reduction.dtype = from;
    reduction.prescale = scale;
    Bytes result(size_of(from));
    const Bytes input(element, element + size_of(from));
    if (scale == 1.0) {
      // It would copy the bits of a NaN; a cast makes it canonical. Two inputs are never copied.
      reduction.op = ReduceOp::kMax;
      return reduced(reduction, {input, input}, 1);
    }
    return reduced(reduction, {input}, 1);
  }
  const double value = value_of(from, element);
  const bool wide = from == DType::kFloat64 || to == DType::kFloat64;
  const float narrow = wide ? static_cast<float>(value * scale) : static_cast<float>(value) * static_cast<float>(scale);
  Bytes result(size_of(to));
  u64 bits = 0;
  if (to == DType::kFloat16) bits = reduce_tests::encode(narrow, 5, 10);
  if (to == DType::kBFloat16) bits = reduce_tests::encode(narrow, 8, 7);
  if (to == DType::kFloat32) {
    float rounded_value;
    reduce_tests::narrow(narrow, &rounded_value);
    std::memcpy(&bits, &rounded_value, sizeof(rounded_value));
  }
  if (to == DType::kFloat64) {
    double rounded_value;
    reduce_tests::narrow(value * scale, &rounded_value);
    std::memcpy(&bits, &rounded_value, sizeof(rounded_value));
  }
  std::memcpy(result.data(), &bits, result.size());
  return result;
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
      const u8* element = pack ? content.data() + k * tensor_size : before.data() + (offsets[i] + k) * fused_size;
      u8* result = pack ? expected_fused.data() + (offsets[i] + k) * fused_size : expected[i].data() + k * tensor_size;
      const Bytes value = cast.raw ? Bytes(element, element + 1) : converted_element(from, to, element, scale);
      std::copy(value.begin(), value.end(), result);
    }
  }
  Copy copy = {};
  copy.segments = table.finish(cast.raw ? kTileBytes : kTileElements);
  copy.n_segments = tensors;
  copy.buffer = fused.data();
  copy.scale = scale;
  copy.scale32 = static_cast<float>(scale);
  copy.into_buffer = pack ? 1 : 0;
  run_alone(seed, 1 + draw(random, 8), 1 + draw(random, 4), [&] { copy_kernels().at(name)(copy); });
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
        if (copy_kernels().count(name) != 0) check_copy(name, cast, seed);
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
      const MeetingKernel kernel = meeting_kernels().at(allreduce_name("twoshot", reduction, n));
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
      const MeetingKernel kernel = meeting_kernels().at(allreduce_name("oneshot", reduction, n));
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

}  // namespace
}  // namespace kvstore_hvd::gpu::tests

int main(int argc, char** argv) { return testing::run(argc, argv); }
