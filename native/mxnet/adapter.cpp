#include "mxnet/adapter.hpp"

#include <algorithm>

namespace kvstore_hvd::mxnet {
namespace {

std::vector<Array> copy_all(const Api& api, const std::vector<Handle>& handles) {
  std::vector<Array> arrays;
  arrays.reserve(handles.size());
  for (Handle handle : handles) arrays.push_back(api.copy(handle));
  return arrays;
}

}  // namespace

MXNetAdapter::MXNetAdapter(std::shared_ptr<Engine> engine, const std::string& library_path, bool naive,
                           std::shared_ptr<Arena> arena)
    : links_{Api::load(library_path), engine, std::make_shared<UnreadErrors>(), std::make_shared<Turns>(), naive},
      engine_(std::move(engine)),
      arena_(std::move(arena)),
      owner_(process_id()) {
  if (!naive) make_room_for_errors(links_.api);
}

Status MXNetAdapter::push_in_place(Request request, Handle array, const StepReduction& how,
                                   std::optional<std::size_t>& bytes) {
  if (links_.naive || array == nullptr || process_id() != owner_ || !api().is_reachable(array)) return Status();
  const std::size_t found = api().bytes_of(array);
  if (found == 0 || !links_.unread->empty() || !engine_->health().ok()) return Status();
  bytes = found;
  return push(std::move(request), {array}, {array}, how);
}

std::shared_ptr<const Step> MXNetAdapter::prepare(const std::vector<ToSum>& arrays) const {
  if (links_.naive) return nullptr;
  auto step = std::make_shared<Step>();
  for (const auto& [name, label, address, priority] : arrays) {
    const auto array = reinterpret_cast<Handle>(address);
    if (array == nullptr || !api().is_reachable(array)) return nullptr;
    const std::size_t bytes = api().bytes_of(array);
    if (bytes == 0) return nullptr;
    try {
      step->add(name, label, api().copy(array), priority, bytes);
    } catch (const Error&) {
      return nullptr;  // what takes the closer look announces the refusal
    }
  }
  return step;
}

Status MXNetAdapter::push(const Step& step, const StepReduction& how) {
  if (process_id() != owner_) return Messages::forked(prefix() + "allreduce: ");
  return step.push(links_, prefix(), how);
}

Status MXNetAdapter::push(Request request, const std::vector<Handle>& inputs, const std::vector<Handle>& outputs,
                          const StepReduction& how) {
  auto group = std::make_shared<Group>();
  group->title = describe_operation(request);
  const std::string begin = prefix() + group->title + ": ";
  if (process_id() != owner_) return Messages::forked(begin);
  const auto is_null = [](Handle handle) { return handle == nullptr; };
  if (inputs.empty() || outputs.empty() || std::any_of(inputs.begin(), inputs.end(), is_null) ||
      std::any_of(outputs.begin(), outputs.end(), is_null)) {
    return Status(ErrorCode::kInvalid, begin + "an operation needs at least one input and one output.");
  }
  std::shared_ptr<Operation> operation;
  try {
    group->members.push_back({request, copy_all(api(), outputs), {}});
    if (inputs != outputs) group->members.front().inputs = copy_all(api(), inputs);
    operation = std::make_shared<Operation>(links_, group, prefix(), how);
    return Operation::push(operation);
  } catch (const Error& error) {
    if (operation == nullptr) announce_refused(std::move(request), error.what());
    return refusal(begin, error.what());
  }
}

void MXNetAdapter::announce_refused(Request request, const std::string& why) {
  const std::uint64_t turn = links_.turns->take(request.name);
  const std::string name = request.name;
  links_.turns->use(name, turn, [owner = links_.engine, failed = as_refused(std::move(request), why)] {
    if (const std::shared_ptr<Engine> engine = owner.lock()) engine->submit(failed);
  });
}

Handle MXNetAdapter::new_array(const std::vector<std::int64_t>& shape, DType dtype) const {
  const bool is_float = dtype == DType::kFloat16 || dtype == DType::kFloat32 || dtype == DType::kFloat64;
  if (arena_ == nullptr || !is_float) return nullptr;
  std::size_t bytes = size_of(dtype);
  for (const std::int64_t extent : shape) bytes *= static_cast<std::size_t>(extent);
  void* memory = bytes == 0 ? nullptr : arena_->allocate(bytes);
  if (memory == nullptr) return nullptr;
  return api()
      .lend(memory, shape, View::Kind::kFloat, static_cast<int>(size_of(dtype)) * 8,
            [arena = arena_, memory] { arena->free(memory); })
      .release();
}

void MXNetAdapter::after_fork_in_child() {
  // Leaked: another thread of the parent may have held their mutexes, and their arrays belong to the parent's engine.
  new std::shared_ptr<UnreadErrors>(std::move(links_.unread));
  new std::shared_ptr<Turns>(std::move(links_.turns));
  links_.unread = std::make_shared<UnreadErrors>();
  links_.turns = std::make_shared<Turns>();
}

}  // namespace kvstore_hvd::mxnet
