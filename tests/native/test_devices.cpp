// Operations on devices: what the ranks agree on, and what becomes of it when the world is lost. The device is one of
// the test: it reduces arrays of this process once the device threads of all ranks have brought a batch.
#include <condition_variable>
#include <memory>

#include "engine/device_queue.hpp"
#include "ranks.hpp"
#include "reduce/reduce.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

using namespace std::chrono_literals;

// What every device thread brings has to be the same in the same order: anything else would hang on real devices.
class Device {
 public:
  explicit Device(int size) : size_(size) {}

  // Returns once all ranks have brought their batch of this number and it is carried out; false when `lost` says so.
  bool carry_out(int rank, const DeviceBatch& batch, const std::function<bool()>& lost) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& brought = batches_[batch.number];
    brought[rank] = &batch;
    if (static_cast<int>(brought.size()) == size_) {
      reduce_all(brought);
      done_ = batch.number + 1;
      changed_.notify_all();
    }
    while (done_ <= batch.number) {
      if (lost()) return false;
      changed_.wait_for(lock, 1ms);
    }
    return true;
  }

 private:
  void reduce_all(const std::map<int, const DeviceBatch*>& brought) {
    const DeviceBatch& first = *brought.begin()->second;
    for (std::size_t i = 0; i < first.operations.size(); ++i) {
      std::vector<const void*> inputs;
      std::vector<void*> outputs;
      for (const auto& [rank, batch] : brought) {
        check_equal(batch->operations.size(), first.operations.size(), "operations of a batch");
        const DeviceOperation& operation = batch->operations[i];
        check(operation.name == first.operations[i].name, "the ranks bring " + operation.name + " at other places");
        inputs.push_back(operation.inputs[0]);
        outputs.push_back(operation.outputs[0]);
      }
      if (first.collective == Collective::kBroadcast) inputs = {inputs[static_cast<std::size_t>(first.root)]};
      reduce(first.collective == Collective::kBroadcast ? Reduction{first.reduction.dtype} : first.reduction,
             inputs.data(), static_cast<int>(inputs.size()), outputs.data(), size_, first.operations[i].count);
    }
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, std::map<int, const DeviceBatch*>> batches_;
  std::uint64_t done_ = 0;
};

// Its thread of one rank, for as long as it lives.
class DeviceThread {
 public:
  DeviceThread(Engine& engine, Device& device)
      : thread_([this, &engine, &device] {
          while (!stop_) {
            const auto batch = engine.take_batch(5ms);
            if (!batch) continue;
            device.carry_out(engine.rank(), *batch, [&] { return stop_ || !engine.health().ok(); });
            check(engine.end_batch(batch->number), "the batch was out");
          }
        }) {}
  ~DeviceThread() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

Request on_device(Request request) {
  request.on_device = true;
  return request;
}

const bool sums = testing::add("sums of any size, among others on the CPU, in any order of submission", [] {
  for (const int size : {1, 2, 3, 4}) {
    Device device(size);
    with_world(size, [&](Engine& engine, int rank) {
      const DeviceThread thread(engine, device);
      for (std::uint32_t seed = 0; seed < 40; ++seed) {
        std::mt19937 common(seed), own(seed * 977 + static_cast<std::uint32_t>(rank));
        std::vector<std::vector<float>> data;
        for (std::uint32_t t = 0; t < 12; ++t) data.push_back(values_of(rank, common() % 3000, seed + t));
        std::vector<std::size_t> order(data.size());
        for (std::size_t t = 0; t < order.size(); ++t) order[t] = t;
        std::shuffle(order.begin(), order.end(), own);
        std::vector<std::shared_ptr<Work>> works(data.size());
        for (const std::size_t t : order) {
          Request request = allreduce("t" + std::to_string(t), data[t], static_cast<int>(own() % 3));
          request.on_device = t % 3 != 0;
          if (t % 4 == 1) {
            request.collective = Collective::kBroadcast;
            request.root = static_cast<int>(t) % size;
          }
          works[t] = engine.submit(std::move(request));
        }
        for (std::size_t t = 0; t < data.size(); ++t) {
          const Status& status = engine.wait(*works[t]);
          check(status.ok(), status.text());
          const auto tensor = seed + static_cast<std::uint32_t>(t);
          check(same_bits(data[t],
                          [&](std::size_t i) {
                            return t % 4 == 1 ? value_of(static_cast<int>(t) % size, i, tensor)
                                              : sum_in_rank_order(size, i, tensor);
                          }),
                "seed " + std::to_string(seed) + ": wrong bits in tensor " + std::to_string(t));
        }
      }
      engine.shutdown();
    });
  }
});

const bool failure = testing::add("a device that fails loses the world, for all, with what it said", [] {
  std::atomic<int> taken{0};
  with_world(2, [&](Engine& engine, int rank) {
    auto data = values_of(rank, 10);
    const auto work = engine.submit(on_device(allreduce("t", data)));
    const auto batch = engine.take_batch(60s);
    check(batch.has_value(), "a batch");
    taken.fetch_add(1);
    while (taken < 2) std::this_thread::sleep_for(1ms);
    if (rank == 1) check(engine.end_batch(batch->number, Status(ErrorCode::kTransport, "the device broke")), "out");
    while (engine.health().ok()) std::this_thread::sleep_for(1ms);
    if (rank == 0) {
      // Its device is still at it.
      check(!engine.wait(*work, 300ms), "an operation ends before its device does");
      check(engine.end_batch(batch->number), "out");
    }
    const Status& status = engine.wait(*work);
    check(status.code() == ErrorCode::kTransport, status.text());
    check(contains(status.text(), "rank 1") && contains(status.text(), "the device broke"), status.text());
    check(!engine.take_batch(0ms).has_value(), "nothing more comes");
    check(!engine.end_batch(batch->number), "once only");
  });
});

const bool own_deadline = testing::add("a device that has begun late has its own time", [] {
  with_world(
      2,
      [](Engine& engine, int rank) {
        auto data = values_of(rank, 10);
        const auto work = engine.submit(on_device(allreduce("t", data)));
        const auto batch = engine.take_batch(10s);
        check(batch.has_value(), "there is a batch");
        std::this_thread::sleep_for(3300ms);
        check(engine.end_batch(batch->number), "the batch is out");
        const Status& status = engine.wait(*work);
        check(status.ok(), status.text());
      },
      3s);
});

// Its memory is given back afterwards, and the other one's device may still read it.
void leave_while_the_other_is_busy(bool lost) {
  std::atomic<int> begun{0};
  std::atomic<bool> leaving{false}, ended{false};
  with_world(2, [&](Engine& engine, int rank) {
    auto data = values_of(rank, 10);
    const auto work = engine.submit(on_device(allreduce("t", data)));
    auto batch = engine.take_batch(10s);
    check(batch.has_value(), "there is a batch");
    for (++begun; begun != 2;) std::this_thread::sleep_for(1ms);
    if (rank == 0) {
      if (lost) engine.abort("the test ends it");
      engine.end_batch(batch->number);
      engine.wait(*work);
      leaving = true;
      engine.shutdown();
      check(ended, "it leaves when the other device is through");
      return;
    }
    while (!leaving) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(30ms);
    ended = true;
    engine.end_batch(batch->number);
    engine.wait(*work);
  });
}

const bool leaves =
    testing::add("a rank does not leave while another one's device is in the batch that it has ended", [] {
      leave_while_the_other_is_busy(false);
      leave_while_the_other_is_busy(true);
    });

const bool not_begun = testing::add("nobody waits for a device that was spared a batch because the world is lost", [] {
  const auto segment = Segment::create(2);
  World& world = segment->world();
  DeviceQueue here(world, 0), there(world, 1);
  for (DeviceQueue* queue : {&here, &there}) {
    queue->put(DeviceBatch());
    const auto batch = queue->take(10s);
    check(batch && queue->done(batch->number), "the first one");
  }
  there.put(DeviceBatch());
  world.failure.set(0, ErrorCode::kTransport, "the test says so");
  check(!there.take(10s).has_value(), "it does not begin");
  check(here.others_are_through([](int) { return false; }), "and is through");
});

}  // namespace
}  // namespace kvstore_hvd
