#include "mxnet/adapter.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/process.hpp"
#include "mxnet/operation.hpp"
#include "mxnet/refusal.hpp"

namespace kvstore_hvd::mxnet {
namespace {

std::vector<Array> copy_all(const Api& api, const std::vector<Handle>& handles) {
  std::vector<Array> arrays;
  arrays.reserve(handles.size());
  for (Handle handle : handles) arrays.push_back(api.copy(handle));
  return arrays;
}

// MXNet's engine waits for ever when one operation names a chunk twice.
void add_new_chunks(const std::vector<Handle>& handles, std::unordered_set<const void*>& chunks,
                    std::vector<Handle>& unique) {
  for (Handle handle : handles) {
    const void* chunk = Api::chunk_of(handle);
    if (chunk != nullptr && chunks.insert(chunk).second) unique.push_back(handle);
  }
}

Status forked(const std::string& prefix) {
  return Status(ErrorCode::kShutdown, prefix +
                                          "this is a forked child; only the parent may communicate.\n"
                                          "  Fix: call the KVStore from the process that created it.");
}

}  // namespace

MXNetAdapter::MXNetAdapter(std::shared_ptr<Engine> engine, const std::string& library_path, bool naive,
                           std::shared_ptr<Arena> arena)
    : api_(Api::load(library_path)),
      engine_(std::move(engine)),
      arena_(std::move(arena)),
      unread_(std::make_shared<UnreadErrors>()),
      turns_(std::make_shared<Turns>()),
      naive_(naive),
      owner_(process_id()) {}

Status MXNetAdapter::pushpull(const std::string& name, const std::string& label, const std::vector<Handle>& inputs,
                              const std::vector<Handle>& outputs, ReduceOp op, double prescale, double postscale,
                              int priority, bool as_half, double weight, std::uint64_t group) {
  Request request;
  request.collective = Collective::kAllreduce;
  request.name = name;
  request.label = label;
  request.op = op;
  request.prescale = prescale;
  request.postscale = postscale;
  request.as_half = as_half;
  request.weight = weight;
  request.group = group;
  request.priority = priority;
  return push(std::move(request), inputs, outputs);
}

Status MXNetAdapter::pushpull_in_place(const std::string& name, const std::string& label, Handle array, int priority,
                                       bool as_half, std::optional<std::size_t>& bytes) {
  if (naive_ || array == nullptr || process_id() != owner_ || !api_->is_reachable(array)) return Status();
  const std::size_t found = api_->bytes_of(array);
  if (found == 0 || !unread_->empty() || !engine_->health().ok()) return Status();
  bytes = found;
  return pushpull(name, label, {array}, {array}, ReduceOp::kSum, 1.0, 1.0, priority, as_half);
}

Status MXNetAdapter::broadcast(const std::string& name, const std::string& label, Handle array, int root,
                               int priority) {
  Request request;
  request.collective = Collective::kBroadcast;
  request.name = name;
  request.label = label;
  request.root = root;
  request.priority = priority;
  return push(std::move(request), {array}, {array});
}

std::shared_ptr<const Step> MXNetAdapter::prepare(const std::vector<ToSum>& arrays) const {
  if (naive_) return nullptr;
  auto step = std::make_shared<Step>();
  for (const auto& [name, label, array, priority] : arrays) {
    if (array == nullptr || !api_->is_reachable(array)) return nullptr;
    const std::size_t bytes = api_->bytes_of(array);
    if (bytes == 0) return nullptr;
    try {
      step->add({name, label, api_->copy(array), priority}, bytes);
    } catch (const Error&) {
      return nullptr;  // what takes the closer look announces the refusal
    }
  }
  return step;
}

Status MXNetAdapter::pushpull(const Step& step, const StepReduction& how) {
  if (process_id() != owner_) return forked(world() + "allreduce: ");
  return step.push({api_, engine_, unread_, turns_}, world(), how);
}

Status MXNetAdapter::push(Request request, const std::vector<Handle>& inputs, const std::vector<Handle>& outputs) {
  std::string prefix = world() + name_of(request.collective) + " " + request.label + ": ";
  if (process_id() != owner_) return forked(prefix);
  const auto is_null = [](Handle handle) { return handle == nullptr; };
  if (inputs.empty() || outputs.empty() || std::any_of(inputs.begin(), inputs.end(), is_null) ||
      std::any_of(outputs.begin(), outputs.end(), is_null)) {
    return Status(ErrorCode::kInvalid, prefix + "an operation needs at least one input and one output.");
  }
  // Inputs are held like outputs: a layer that only reads its weights may nevertheless rearrange their memory for
  // oneDNN.
  std::unordered_set<const void*> chunks;
  std::vector<Handle> unique;
  add_new_chunks(inputs, chunks, unique);
  add_new_chunks(outputs, chunks, unique);

  const int priority = request.priority;
  std::shared_ptr<Operation> operation;
  try {
    operation = std::make_shared<Operation>(api_, engine_, unread_, turns_, request, prefix, copy_all(*api_, inputs),
                                            copy_all(*api_, outputs), naive_);
    // While another operation waits for its arrays, this one will probably wait for its own. The first to wait, in a
    // training, is the one whose gradient is ready last: it may as well wait behind computation.
    const Place place = turns_->all_used() ? Place::kHere : Place::kCommunication;
    operation->take_turn();
    api_->push(operation, std::move(unique), place, priority, operation->name());
    return naive_ ? operation->status() : Status();
  } catch (const Error& error) {
    if (operation == nullptr) announce_refused(std::move(request), error.what());
    return refusal(prefix, error.what());
  }
}

void MXNetAdapter::announce_refused(Request request, const std::string& why) {
  const std::uint64_t turn = turns_->take(request.name);
  const std::string name = request.name;
  // Weak: as Operation.
  turns_->use(name, turn, [owner = std::weak_ptr<Engine>(engine_), failed = as_refused(std::move(request), why)] {
    if (const std::shared_ptr<Engine> engine = owner.lock()) engine->submit(failed);
  });
}

const std::string& MXNetAdapter::world() const { return engine_->speaker(); }

Handle MXNetAdapter::new_array(const std::vector<std::int64_t>& shape, DType dtype) const {
  const bool is_float = dtype == DType::kFloat16 || dtype == DType::kFloat32 || dtype == DType::kFloat64;
  if (arena_ == nullptr || !is_float) return nullptr;
  std::size_t bytes = size_of(dtype);
  for (const std::int64_t extent : shape) bytes *= static_cast<std::size_t>(extent);
  void* memory = bytes == 0 ? nullptr : arena_->allocate(bytes);
  if (memory == nullptr) return nullptr;
  return api_
      ->lend(memory, shape, View::Kind::kFloat, static_cast<int>(size_of(dtype)) * 8,
             [arena = arena_, memory] { arena->free(memory); })
      .release();
}

Status MXNetAdapter::take_unread_error() { return unread_->take(*api_); }

void MXNetAdapter::after_fork_in_child() {
  // Leaked: another thread of the parent may have held their mutexes, and their arrays belong to the parent's engine.
  new std::shared_ptr<UnreadErrors>(std::move(unread_));
  new std::shared_ptr<Turns>(std::move(turns_));
  unread_ = std::make_shared<UnreadErrors>();
  turns_ = std::make_shared<Turns>();
}

}  // namespace kvstore_hvd::mxnet
