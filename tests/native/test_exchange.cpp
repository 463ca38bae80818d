// Exchanges: who gets what, at any size and number of ranks; test_programs.cpp has them beside other operations.
#include <sys/mman.h>

#include <string>

#include "check.hpp"
#include "ranks.hpp"

namespace kvstore_hvd {
namespace {

using testing::check;

const std::vector<int> kSizes{1, 2, 3, 4, 7};

Request transfer(Collective collective, const std::string& name, const std::vector<float>& input,
                 std::vector<float>& output, std::size_t count) {
  Request request;
  request.collective = collective;
  request.name = name;
  request.inputs = {input.data()};
  request.outputs = {output.data()};
  request.count = count;
  request.shape = {static_cast<std::int64_t>(count)};
  request.contributed = input.size();
  return request;
}

// Rank r sends (r + d) % 3 * scale elements to rank d.
void all_to_all(Engine& engine, int rank, std::size_t scale, const std::string& name) {
  const int size = engine.size();
  const auto sent = [&](int from, int to) { return static_cast<std::size_t>((from + to) % 3) * scale; };
  const auto begin_of = [&](int from, int to) {
    std::size_t begin = 0;
    for (int d = 0; d < to; ++d) begin += sent(from, d);
    return begin;
  };
  std::size_t most = 0, total = 0;
  std::vector<Part> parts;
  for (int r = 0; r < size; ++r) {
    most = std::max(most, begin_of(r, size));
    const std::size_t bytes = sent(r, rank) * sizeof(float);
    parts.push_back(Part{r, begin_of(r, rank) * sizeof(float), bytes, total * sizeof(float)});
    total += sent(r, rank);
  }
  const auto input = values_of(rank, begin_of(rank, size));
  std::vector<float> output(total);
  Request request = transfer(Collective::kExchange, name, input, output, most);
  request.parts = parts;
  const Status status = engine.run(std::move(request));
  check(status.ok(), status.text());
  for (int r = 0; r < size; ++r) {
    const auto all = values_of(r, begin_of(r, size));
    const auto from = all.begin() + static_cast<std::ptrdiff_t>(begin_of(r, rank));
    check(
        std::equal(from, from + static_cast<std::ptrdiff_t>(sent(r, rank)),
                   output.begin() + static_cast<std::ptrdiff_t>(parts[static_cast<std::size_t>(r)].to / sizeof(float))),
        name + ": what rank " + std::to_string(r) + " sent");
  }
}

const bool exchanges = testing::add("an exchange hands over what is asked for", [] {
  for (const int size : kSizes) {
    with_world(size, [](Engine& engine, int rank) {
      for (const std::size_t scale : {0, 1, 17, 4096, 50001, 300000}) {
        all_to_all(engine, rank, scale, "all-to-all" + std::to_string(scale));
      }
    });
  }
});

// In a child: memory that cannot be read lies behind the array.
const bool short_arrays = testing::add("nothing is read behind an array that is shorter than the others'", [] {
  constexpr std::size_t kShort = 5000, kLong = 200000, kPage = 4096;
  constexpr std::size_t kBytes = (kShort * sizeof(float) + kPage - 1) / kPage * kPage;
  const bool is_right = succeeds_in_child([&] {
    auto* const pages =
        static_cast<char*>(mmap(nullptr, kBytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(pages + kBytes, kPage, PROT_NONE);
    with_world(2, [&](Engine& engine, int rank) {
      const auto mine = values_of(rank, rank == 0 ? kShort : kLong);
      std::vector<float> output(kShort + kLong);
      Request request = transfer(Collective::kExchange, "x", mine, output, kLong);
      if (rank == 0) {
        request.inputs = {std::memcpy(pages + kBytes - kShort * sizeof(float), mine.data(), kShort * sizeof(float))};
      }
      request.parts = {Part{0, 0, kShort * sizeof(float), 0},
                       Part{1, 0, kLong * sizeof(float), kShort * sizeof(float)}};
      check(engine.run(std::move(request)).ok(), "run");
      check(same_bits(output, [=](std::size_t i) { return i < kShort ? value_of(0, i) : value_of(1, i - kShort); }),
            "the arrays, one after the other");
    });
    return testing::failures == 0;
  });
  check(is_right, "the child reads on");
});

const bool checked = testing::add("what a rank can see to be wrong fails on every rank", [] {
  with_world(2, [](Engine& engine, int rank) {
    std::vector<float> input(4), output(8);
    const auto fails = [&](const std::string& name, std::vector<Part> parts, Collective collective) {
      Request request = transfer(collective, name, input, output, 4);
      request.parts = std::move(parts);
      if (rank == 1) request.parts = {Part{1, 0, 4, 0}};
      const Status status = engine.run(std::move(request));
      check(status.code() == ErrorCode::kInputFailed, name + ": " + status.text());
    };
    fails("rank", {Part{2, 0, 4, 0}}, Collective::kExchange);
    fails("range", {Part{0, 8, 12, 0}}, Collective::kExchange);
    fails("element", {Part{0, 2, 4, 0}}, Collective::kExchange);
    fails("parts", {}, Collective::kReduceScatter);
    Request request = transfer(Collective::kExchange, "disagree", input, output, rank == 0 ? 4 : 5);
    check(engine.run(std::move(request)).code() == ErrorCode::kMismatch, "the largest contribution");
    all_to_all(engine, rank, 10, "and the world goes on");
  });
});

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }
