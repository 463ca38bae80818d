// Operations of several ranks with arrays of their own, and what these must hold afterwards.
#pragma once

#include "kernel_table.hpp"
#include "worlds.hpp"

namespace kvstore_hvd::gpu::tests {

// One launch of every rank. Segments are random in number, length and alignment.
class Operation {
 public:
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  void run() const { kernel_(worlds_, launch_); }

  // The rank's kernel has ended: keep what it wrote, and overwrite everything that is the rank's own again.
  void ended(u32 rank) {
    for (std::size_t i = 0; i < outputs_[rank].size(); ++i) {
      kept_[rank].push_back(outputs_[rank][i]->content());
      overwrite(*outputs_[rank][i], kept_[rank].back().size());
    }
    for (const auto& input : inputs_[rank]) overwrite(*input, input->content().size());
  }

  bool is_right() const {
    bool right = true;
    for (u32 rank = 0; rank < outputs_.size(); ++rank) right = is_right(rank) && right;
    return right;
  }
  bool is_right(u32 rank) const {
    bool right = true;
    for (const auto& array : outputs_[rank]) {
      right = check(array->guarded(), what_ + ": rank " + std::to_string(rank) + " wrote beside an output") && right;
    }
    return check(kept_[rank] == expected_[rank], what_ + ": rank " + std::to_string(rank) + " is wrong") && right;
  }
  const std::string& what() const { return what_; }

 protected:
  Operation(Ranks& ranks, std::string what)
      : worlds_(ranks.worlds()),
        what_(std::move(what)),
        inputs_(ranks.size()),
        outputs_(ranks.size()),
        kept_(ranks.size()),
        expected_(ranks.size()) {}

  static void overwrite(Array& array, std::size_t bytes) { std::memset(array.data(), 0x3c, bytes); }

  const World* worlds_;
  std::string what_;
  Launch launch_ = {};
  MeetingKernel kernel_ = nullptr;
  std::vector<std::vector<std::shared_ptr<Array>>> inputs_;
  std::vector<std::vector<std::shared_ptr<Array>>> outputs_;
  std::vector<std::vector<Bytes>> kept_;
  std::vector<std::vector<Bytes>> expected_;
  std::unique_ptr<Table> in_;
  std::unique_ptr<Table> out_;
};

inline u32 draw(std::mt19937_64& random, u32 below) { return static_cast<u32>(random() % below); }

// Arrays of random bit patterns, or, where the order of the additions must not matter, of small whole numbers.
inline std::vector<Bytes> contributions(const Reduction& reduction, u32 n, std::size_t count, bool exact,
                                        std::mt19937_64& random) {
  std::vector<Bytes> arrays = reduce_tests::random_arrays(reduction.dtype, static_cast<int>(n), count, random());
  if (!exact) return arrays;
  for (Bytes& array : arrays) {
    for (std::size_t i = 0; i < count; ++i) {
      const bool product = reduction.op == ReduceOp::kProduct;
      const double value = product ? (draw(random, 2) == 0 ? -1.0 : 2.0) : static_cast<double>(draw(random, 15)) - 7.0;
      // Integers wrap around: any order gives the same bits.
      if (!reduce_tests::is_float(reduction.dtype)) continue;
      reduce_tests::set_element(reduction.dtype, array, i, reduce_tests::bits_of(reduction.dtype, value));
    }
  }
  return arrays;
}

inline Reduction random_reduction(std::mt19937_64& random, bool exact) {
  Reduction reduction;
  reduction.dtype = static_cast<DType>(draw(random, kDTypes));
  reduction.op = static_cast<ReduceOp>(draw(random, kReduceOps));
  const double scales[] = {1.0, 0.5, 2.0, 1.0 / 3.0, 1e-40};
  reduction.prescale = scales[draw(random, 3) == 0 ? draw(random, exact ? 3 : 5) : 0];
  reduction.postscale = scales[draw(random, 3) == 0 ? draw(random, exact ? 3 : 5) : 0];
  reduction.as_half = can_be_half(reduction.dtype, reduction.op) && draw(random, 4) == 0;
  return reduction;
}

// With one rank the CPU engine copies where there is nothing to compute; a kernel computes always, and the host
// launches a copy instead.
inline Reduction never_a_copy(Reduction reduction, u32 n) {
  if (n == 1 && reduction.prescale == 1.0 && reduction.postscale == 1.0) reduction.postscale = 0.5;
  return reduction;
}

inline Bytes reduced(const Reduction& reduction, const std::vector<Bytes>& inputs, std::size_t count) {
  Bytes result(count * size_of(reduction.dtype));
  std::vector<const void*> from;
  for (const Bytes& input : inputs) from.push_back(input.data());
  void* to = result.data();
  reduce(reduction, from.data(), static_cast<int>(from.size()), &to, 1, count);
  return result;
}

// Allreduce and reduce-scatter of several tensors by `oneshot` or `twoshot`; allreduce of one array around the `ring`.
class Reduced final : public Operation {
 public:
  Reduced(Ranks& ranks, const std::string& algorithm, std::mt19937_64& random, u64 most_bytes, u64 timeout_ns)
      : Operation(ranks, algorithm) {
    const u32 n = ranks.size();
    const bool ring = algorithm == "ring";
    Reduction reduction = random_reduction(random, ring);
    if (!ring) reduction = never_a_copy(reduction, n);
    const std::size_t size = size_of(reduction.dtype);
    const u32 tensors = ring ? 1 : 1 + draw(random, 4);
    const bool scatter = algorithm == "oneshot" && draw(random, 4) == 0;
    what_ += " of " + reduce_tests::describe(reduction, n, tensors) + (scatter ? " scattered" : "");
    launch_ = launch_of(reduction, timeout_ns);
    if (!ring) launch_.staging_offset = ranks.next_staging_offset();
    in_ = std::make_unique<Table>(n, tensors);
    out_ = std::make_unique<Table>(n, tensors);
    const auto any_shift = [&] { return draw(random, 3) == 0 ? draw(random, 16) * size : 0; };
    u64 offset = 0;
    for (u32 i = 0; i < tensors; ++i) {
      const std::size_t count = draw(random, static_cast<u32>(most_bytes / tensors / size));
      const std::vector<Bytes> values = contributions(reduction, n, count, ring, random);
      const Bytes result = reduced(reduction, values, count);
      const u32 owner = draw(random, n);
      for (u32 rank = 0; rank < n; ++rank) {
        const std::size_t shift = any_shift();
        inputs_[rank].push_back(std::make_shared<Array>(count * size, shift));
        inputs_[rank].back()->set(values[rank]);
        in_->set(rank, i, inputs_[rank].back()->data(), offset, count * size);
        if (scatter && rank != owner) continue;
        const bool in_place = draw(random, 2) == 0;
        const std::size_t other_shift = ring ? shift : any_shift();
        outputs_[rank].push_back(in_place ? inputs_[rank].back() : std::make_shared<Array>(count * size, other_shift));
        out_->set(rank, i, outputs_[rank].back()->data(), offset, count * size);
        expected_[rank].push_back(result);
      }
      offset += ring ? count * size : rounded(count * size);
    }
    launch_.bytes = offset;
    launch_.inputs = in_->finish(kTileBytes);
    launch_.outputs = out_->finish(kTileBytes);
    launch_.n_inputs = launch_.n_outputs = tensors;
    kernel_ = kernel_named<MeetingKernel>(allreduce_name(algorithm, reduction, ring || draw(random, 2) == 0 ? n : 0));
  }
};

// Every rank takes pieces of what the ranks have: broadcast, allgather and alltoall are special cases.
class Exchange final : public Operation {
 public:
  Exchange(Ranks& ranks, std::mt19937_64& random, u64 most_bytes, u64 timeout_ns) : Operation(ranks, "exchange") {
    const u32 n = ranks.size();
    const u32 pieces = 1 + draw(random, 4);
    launch_ = launch_of(Reduction(), timeout_ns);
    launch_.staging_offset = ranks.next_staging_offset();
    in_ = std::make_unique<Table>(n, 1);
    out_ = std::make_unique<Table>(n, pieces);
    std::vector<Bytes> values;
    for (u32 rank = 0; rank < n; ++rank) {
      const u32 bytes = draw(random, static_cast<u32>(most_bytes));
      values.push_back(reduce_tests::random_array(DType::kUInt8, bytes, random));
      inputs_[rank].push_back(std::make_shared<Array>(bytes, draw(random, 16)));
      inputs_[rank].back()->set(values.back());
      in_->set(rank, 0, inputs_[rank].back()->data(), 0, bytes);
    }
    for (u32 rank = 0; rank < n; ++rank) {
      for (u32 i = 0; i < pieces; ++i) {
        const u32 source = draw(random, n);
        const std::size_t from = values[source].empty() ? 0 : draw(random, static_cast<u32>(values[source].size()));
        const std::size_t bytes = draw(random, static_cast<u32>(values[source].size() - from) + 1);
        outputs_[rank].push_back(std::make_shared<Array>(bytes, draw(random, 16)));
        out_->set(rank, i, outputs_[rank].back()->data(), from, bytes, source);
        const auto begin = values[source].begin() + static_cast<long>(from);
        expected_[rank].emplace_back(begin, begin + static_cast<long>(bytes));
      }
    }
    launch_.inputs = in_->finish(kTileBytes);
    launch_.outputs = out_->finish(kTileBytes);
    launch_.n_inputs = 1;
    launch_.n_outputs = pieces;
    kernel_ = kernel_named<MeetingKernel>("kvhvd_exchange");
  }
};

}  // namespace kvstore_hvd::gpu::tests
