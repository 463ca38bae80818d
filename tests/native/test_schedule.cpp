// The schedule and the table of tensors, one thread at a time.
#include "engine/schedule.hpp"
#include "engine/tensor_table.hpp"
#include "ranks.hpp"
#include "shm/segment.hpp"

namespace kvstore_hvd {
namespace {

// Announces `name` on every rank of the world and makes it ready; `direct`: as if it lay in the ranks' arenas.
std::uint32_t make_ready(World& world, const std::string& name, std::size_t count, int priority, bool direct = false,
                         bool on_device = false) {
  std::vector<float> data(count);
  Request request = allreduce(name, data);
  request.on_device = on_device;
  std::uint32_t slot = kNoSlot;
  for (int r = 0; r < world.ranks; ++r) {
    Alarm alarm(world, r, std::chrono::seconds(10));
    TensorTable table(world, alarm);
    const auto handle = table.find(name);
    check(handle.has_value(), "a slot");
    slot = handle->slot;
    const auto outcome = table.announce(*handle, request);
    const bool last = r + 1 == world.ranks;
    check(outcome == (last ? TensorTable::Outcome::kLast : TensorTable::Outcome::kWaiting), "outcome");
  }
  if (direct) world.slots[slot].direct = 1;
  Alarm alarm(world, 0, std::chrono::seconds(10));
  Schedule(world, alarm).make_ready(slot, priority);
  return slot;
}

// A world in which nothing is too small for a schedule, and rank 0's view of that.
struct Scheduled {
  explicit Scheduled(int size, const std::string& more = "")
      : segment(Segment::create(size, 0, parse_thresholds("inlined=0,inlined_direct=0" + more))) {}
  const std::shared_ptr<Segment> segment;
  World& world = segment->world();
  Alarm alarm{world, 0, std::chrono::seconds(10)};
  Schedule schedule{world, alarm};
};

const bool priority = testing::add("the highest priority goes first, and overtakes at the next chunk", [] {
  auto [segment, world, alarm, schedule] = Scheduled(2);
  Entry entry;
  check(!schedule.fetch(0, entry) && !schedule.available(0), "nothing to do at first");

  const std::uint32_t low = make_ready(world, "low", 1 << 20, -10);
  check(schedule.fetch(0, entry) && entry.pieces[0].slot == low && entry.pieces[0].offset == 0, "low starts");
  const std::uint32_t high = make_ready(world, "high", 1 << 15, -1);
  check(schedule.fetch(1, entry) && entry.pieces[0].slot == high, "high overtakes");
  Entry again;
  check(schedule.fetch(1, again) && again.pieces[0].slot == high, "an entry that was decided stays");

  std::uint64_t low_bytes = 0, high_bytes = entry.pieces[0].bytes;
  bool high_done = high_bytes == (1 << 15) * 4;
  for (std::uint32_t i = 2; schedule.fetch(i, entry); ++i) {
    for (std::uint32_t p = 0; p < entry.n_pieces; ++p) {
      const Piece& piece = entry.pieces[p];
      if (piece.slot == high) {
        high_bytes += piece.bytes;
        high_done = high_bytes == (1 << 15) * 4;
      } else {
        check(high_done, "low goes on only after high is done");
        low_bytes += piece.bytes;
      }
    }
  }
  check(high_done && low_bytes < (1 << 20) * 4 && low_bytes > 0, "all bytes are scheduled once");
});

// finished counts entries modulo 2^32, and staged entries do not touch it: what a direct entry of long ago left there
// must not pass for the end of the one that uses it now, or its result would be handed out half reduced.
const bool stale_claims = testing::add("claims that were last used 2^31 entries ago do not look finished", [] {
  auto [segment, world, alarm, schedule] = Scheduled(2);
  world.claims[0].finished.post(0x7fffff00);
  check(world.claims[0].finished.reached(1), "the old count is ahead of the first entry");
  const std::uint32_t slot = make_ready(world, "direct", 1 << 10, 0, true);
  Entry entry;
  check(schedule.fetch(0, entry) && entry.pieces[0].slot == slot, "the entry");
  check(entry.algorithm == Algorithm::kDirect, "it is direct");
  check(!world.claims[0].finished.reached(1), "its claims are not finished");
});

// Any setting gives chunks that the staging memory holds and that cut no element.
const bool extremes = testing::add("plans are sound for the least and the greatest thresholds", [] {
  for (const ThresholdInfo& info : threshold_infos()) {
    for (const std::uint32_t value : {info.least, info.most}) {
      Thresholds thresholds;
      thresholds.*info.field = value;
      if (thresholds.min_part > thresholds.max_part) continue;
      for (const std::uint32_t ranks : {1U, 2U, 3U, 7U, 8U, 64U, 256U}) {
        const std::uint32_t stage = std::min(ranks * (128U << 10), 1U << 20);
        for (std::uint64_t bytes = 1; bytes < std::uint64_t{1} << 34; bytes = bytes * 3 + 1) {
          const ChunkPlan staged = plan_chunk(thresholds, Collective::kAllreduce, false, bytes, ranks, stage);
          const bool cut = bytes > staged.bytes;
          check(staged.bytes > 0 && staged.bytes <= stage && staged.bytes % 64 == 0,
                std::string("chunk, ") + info.name);
          check(!cut || staged.algorithm == Algorithm::kTwoShot, std::string("one-shot in pieces, ") + info.name);
          const ChunkPlan direct = plan_chunk(thresholds, Collective::kAllreduce, true, bytes, ranks, stage);
          check(direct.part > 0 && direct.part % 64 == 0 && direct.bytes % 64 == 0, std::string("part, ") + info.name);
        }
      }
    }
  }
});

const bool fusion = testing::add("small tensors are fused into one entry, in the order of priority or arrival", [] {
  for (const int step : {0, 1}) {
    auto [segment, world, alarm, schedule] = Scheduled(2);
    std::vector<std::uint32_t> slots;
    for (int i = 0; i < 10; ++i) slots.push_back(make_ready(world, "t" + std::to_string(i), 10, -i * step));
    Entry entry;
    check(schedule.fetch(0, entry) && entry.n_pieces == 10, "one entry for all");
    for (std::uint32_t p = 0; p < 10; ++p) {  // each on cache lines of its own
      check(entry.pieces[p].slot == slots[p] && entry.pieces[p].staged == p * 64 && entry.pieces[p].bytes == 40,
            "piece");
    }
    check(!schedule.fetch(1, entry), "nothing is left");
  }
});

const bool batches = testing::add("a batch of a device has one way to combine, and no more than the threshold", [] {
  const std::pair<const char*, std::function<void(Slot&)>> all[] = {
      {"collective", [](Slot& one) { one.agreed.collective = Collective::kBroadcast; }},
      {"dtype", [](Slot& one) { one.agreed.dtype = DType::kInt32; }},
      {"op", [](Slot& one) { one.agreed.op = ReduceOp::kMax; }},
      {"compression", [](Slot& one) { one.agreed.as_half = 1; }},
      {"root", [](Slot& one) { one.agreed.root = 1; }},
      {"prescale", [](Slot& one) { one.agreed.prescale = 2.0; }},
      {"postscale", [](Slot& one) { one.agreed.postscale = 2.0; }},
      {"weights", [](Slot& one) { one.weights = 3.0; }},
  };
  for (const auto& [what, change] : all) {
    auto [segment, world, alarm, schedule] = Scheduled(2);
    make_ready(world, "one", 10, 2, false, true);
    make_ready(world, "alike", 10, 1, false, true);
    change(world.slots[make_ready(world, "other", 10, 0, false, true)]);
    Entry entry;
    check(schedule.fetch(0, entry) && entry.n_pieces == 2, what);
  }
  auto [segment, world, alarm, schedule] = Scheduled(2, ",device_fusion=0");
  for (const char* const name : {"one", "alike"}) make_ready(world, name, 10, 0, false, true);
  Entry entry;
  check(schedule.fetch(0, entry) && entry.n_pieces == 1, "beyond the threshold");
});

const bool devices =
    testing::add("devices get the next batch once all have begun the last, and in order of priority", [] {
      auto [segment, world, alarm, schedule] = Scheduled(3);
      const std::uint32_t low = make_ready(world, "low", 64, -1, false, true);
      const std::uint32_t here = make_ready(world, "here", 64, 0);
      Entry entry;
      check(schedule.fetch(0, entry) && entry.pieces[0].slot == here, "the host's goes first, if it has the priority");
      const std::uint32_t last = make_ready(world, "last", 64, -2);
      check(schedule.fetch(1, entry) && entry.pieces[0].slot == low, "and the devices', if theirs is higher");
      check(entry.algorithm == Algorithm::kDevice && entry.n_pieces == 1, "a batch");
      const std::uint32_t next = make_ready(world, "next", 64, 5, false, true);
      check(schedule.fetch(2, entry) && entry.pieces[0].slot == last, "no device has begun: the host goes on");
      for (int r = 0; r < 3; ++r) {
        check(!schedule.available(3) && !schedule.fetch(3, entry), "not all devices have begun the batch");
        world.rank(r).batches_begun.store(1);
      }
      check(schedule.available(3) && schedule.fetch(3, entry) && entry.pieces[0].slot == next, "now all have");
    });

const bool versions = testing::add("a slot that changed hands tells those who remember it", [] {
  auto [segment, world, alarm, schedule] = Scheduled(1);
  TensorTable table(world, alarm);
  const auto first = table.find("first");
  check(first.has_value() && table.find("first")->slot == first->slot, "a name keeps its slot");
  for (int i = 1; i < kSlots; ++i) check(table.find("name" + std::to_string(i)).has_value(), "a slot for each");
  const auto taken = table.find("one too many");
  check(taken.has_value() && taken->slot == first->slot && taken->version != first->version, "the oldest idle slot");
  std::vector<float> data(1);
  check(table.announce(*first, allreduce("first", data)) == TensorTable::Outcome::kStale, "stale");
  check(table.announce(*taken, allreduce("one too many", data)) == TensorTable::Outcome::kLast, "fresh");
  const auto again = table.find("first");
  check(again.has_value() && again->slot != taken->slot, "a busy slot is not taken");
  table.complete(taken->slot);
  bool given_anew = false;
  for (int i = 0; i < kSlots; ++i) given_anew |= table.find("later" + std::to_string(i))->slot == taken->slot;
  check(given_anew, "an announcement that was stale keeps no slot");
});

}  // namespace
}  // namespace kvstore_hvd
