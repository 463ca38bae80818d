#include "mxnet/engine_abi.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <thread>

namespace kvstore_hvd::mxnet {
namespace {

// mxnet::Context
struct Context {
  std::int32_t device_type;
  std::int32_t device_id;
};
constexpr Context kCpu{1, 0};
constexpr int kGpu = 2;

// FnProperty: kNormal is computation; kCPUPrioritized has a thread pool of its own; kAsync runs in the caller, or
// shares the pool of computation.
constexpr std::int32_t kNormal = 0;
constexpr std::int32_t kCpuPrioritized = 3;
constexpr std::int32_t kAsync = 4;
constexpr int kDefaultStorage = 0;
constexpr int kVersion2 = 20000;

// DLManagedTensor, with what it refers to.
struct Lent {
  DlTensor tensor;
  void* context;
  void (*release)(Lent*);
  std::vector<std::int64_t> shape;
  std::function<void()> released;
};

struct Pushed {
  explicit Pushed(std::shared_ptr<AsyncOp> operation) : op(std::move(operation)) {}
  const std::shared_ptr<AsyncOp> op;
  // Plain: MXNet orders the start of an operation before its deletion.
  bool started = false;
  // Of the pushing thread only. What MXNet deletes within the push was skipped or refused, as its result says.
  const std::thread::id pusher = std::this_thread::get_id();
  bool pushing = true;
  bool deleted = false;
};

void start(void* parameter, const Completion& complete) {
  Pushed& pushed = **static_cast<std::shared_ptr<Pushed>*>(parameter);
  pushed.started = true;
  // Kept beyond the completion, which may delete `pushed`.
  std::shared_ptr<AsyncOp> op = pushed.op;
  op->start(complete);
}

void start_1(void*, void* complete, void* parameter) { start(parameter, *static_cast<const Completion*>(complete)); }

void start_2(void*, void* on_start, void* complete, void* parameter) {
  const Completion& begin = *static_cast<const Completion*>(on_start);
  if (begin.function != nullptr) begin.function(begin.engine, begin.operation, nullptr);
  start(parameter, *static_cast<const Completion*>(complete));
}

void drop(void* parameter) {
  const std::unique_ptr<std::shared_ptr<Pushed>> owned(static_cast<std::shared_ptr<Pushed>*>(parameter));
  Pushed& pushed = **owned;
  if (std::this_thread::get_id() == pushed.pusher && pushed.pushing) {
    pushed.deleted = true;
  } else if (!pushed.started) {
    pushed.op->skipped();
  }
}

const std::int32_t& property_of(Place place) {
  switch (place) {
    case Place::kHere:
      return kAsync;
    case Place::kCommunication:
      return kCpuPrioritized;
    case Place::kComputation:
      break;
  }
  return kNormal;
}

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

template <typename Function>
void require(void* library, const char* name, Function& function) {
  if (!find(library, name, function)) throw Error(std::string("this libmxnet.so has no function ") + name);
}

}  // namespace

void Completion::succeed() const { function(engine, operation, nullptr); }

void Completion::fail(const std::string& text) const {
  // MXNet copies the error as a dmlc::Error, which adds nothing to std::runtime_error.
  const std::runtime_error error(text);
  // One at a time, see errors.hpp. MXNet neither waits within the call nor ends another operation.
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  function(engine, operation, &error);
}

std::shared_ptr<const Api> Api::load(const std::string& library_path) {
  // Never closed: MXNet cannot be unloaded, and operations may be in flight until the process ends.
  void* library = dlopen(library_path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) throw Error("MXNet's library " + library_path + " is not loaded in this process");
  std::shared_ptr<Api> api(new Api);
  require(library, "MXGetVersion", api->get_version_);
  require(library, "MXGetLastError", api->get_last_error_);
  require(library, "MXEnginePushAsyncND", api->push_async_);
  require(library, "MXShallowCopyNDArray", api->shallow_copy_);
  require(library, "MXNDArrayFree", api->free_);
  require(library, "MXNDArrayGetStorageType", api->get_storage_type_);
  require(library, "MXNDArrayGetContext", api->get_context_);
  require(library, "MXNDArrayGetDType", api->get_dtype_);
  // 1.x, then 2.x.
  if (!find(library, "MXNDArrayGetShapeEx64", api->get_shape_)) {
    require(library, "MXNDArrayGetShape64", api->get_shape_);
  }
  require(library, "MXNDArrayWaitToRead", api->wait_to_read_);
  require(library, "MXNDArrayToDLPack", api->to_dlpack_);
  require(library, "MXNDArrayCallDLPackDeleter", api->delete_dlpack_);
  // 1.x, then 2.x.
  if (!find(library, "MXNDArrayFromDLPackEx", api->from_dlpack_)) {
    require(library, "MXNDArrayFromDLPack", api->from_dlpack_);
  }
  // NDArray::Chunk::Reorder2Default(), what MXNet itself calls in such an operation; the C API has only
  // MXNDArrayGetData, which would wait for the operation that calls it.
  find(library, "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv", api->make_plain_);
  // -fopenmp would bind this library to one OpenMP, perhaps another than MXNet's.
  if (!find(library, "omp_get_thread_num", api->thread_) || !find(library, "omp_get_num_threads", api->threads_) ||
      !find(library, "GOMP_parallel", api->parallel_)) {
    api->parallel_ = nullptr;
  }
  api->check(api->get_version_(&api->version_));
  return api;
}

Error Api::last_error() const { return Error(get_last_error_()); }

void Api::check(int status) const {
  if (status != 0) throw last_error();
}

void Api::add_new_chunks(const std::vector<Array>& arrays, std::vector<const void*>& chunks,
                         std::vector<Handle>& handles) {
  for (const Array& array : arrays) {
    const void* chunk = chunk_of(array.get());
    if (chunk == nullptr || std::find(chunks.begin(), chunks.end(), chunk) != chunks.end()) continue;
    chunks.push_back(chunk);
    handles.push_back(array.get());
  }
}

Array Api::copy(Handle array) const {
  Handle copied = nullptr;
  check(shallow_copy_(array, &copied));
  return Array(copied, Release{shared_from_this(), &Api::free_});
}

bool Api::is_dense(Handle array) const {
  if (chunk_of(array) == nullptr) return false;
  int storage_type = kDefaultStorage;
  check(get_storage_type_(array, &storage_type));
  return storage_type == kDefaultStorage;
}

bool Api::is_reachable(Handle array) const {
  if (!is_dense(array)) return false;
  int device_type = kCpu.device_type;
  int device_id = 0;
  check(get_context_(array, &device_type, &device_id));
  return device_type != kGpu;
}

std::vector<std::int64_t> Api::shape_of(Handle array) const {
  int dimensions = 0;
  const std::int64_t* shape = nullptr;
  check(get_shape_(array, &dimensions, &shape));
  return dimensions < 0 ? std::vector<std::int64_t>{-1} : std::vector<std::int64_t>{shape, shape + dimensions};
}

int Api::dtype_number(Handle array) const {
  int dtype = -1;
  check(get_dtype_(array, &dtype));
  return dtype;
}

std::size_t Api::bytes_of(Handle array) const {
  // mshadow's numbers: float32, float64, float16, uint8, int32, int8, int64; 12 is bfloat16.
  constexpr std::size_t kBytes[] = {4, 8, 2, 1, 4, 1, 8};
  constexpr int kBfloat16 = 12;
  const int dtype = dtype_number(array);
  const bool known = dtype >= 0 && dtype < static_cast<int>(std::size(kBytes));
  std::size_t bytes = known ? kBytes[dtype] : dtype == kBfloat16 ? 2 : 0;
  for (const std::int64_t extent : shape_of(array))
    bytes *= static_cast<std::size_t>(std::max<std::int64_t>(extent, 0));
  return bytes;
}

Array Api::lend(void* data, const std::vector<std::int64_t>& shape, View::Kind kind, int bits,
                std::function<void()> release) const {
  auto lent = std::make_unique<Lent>();
  lent->shape = shape;
  lent->released = std::move(release);
  lent->release = [](Lent* self) {
    self->released();
    delete self;
  };
  DlTensor& tensor = lent->tensor;
  tensor.data = data;
  tensor.device_type = kCpu.device_type;
  tensor.dimensions = static_cast<std::int32_t>(shape.size());
  tensor.kind = static_cast<std::uint8_t>(kind);
  tensor.bits = static_cast<std::uint8_t>(bits);
  tensor.lanes = 1;
  tensor.shape = lent->shape.data();
  Handle array = nullptr;
  if (from_dlpack_(lent.get(), false, &array) != 0) {
    lent->released();
    throw last_error();
  }
  static_cast<void>(lent.release());
  return Array(array, Release{shared_from_this(), &Api::free_});
}

View Api::open(Handle array) const {
  void* tensor = nullptr;
  if (to_dlpack_(array, &tensor) != 0) {
    const Error first = last_error();
    if (make_plain_ == nullptr || chunk_of(array) == nullptr) throw first;
    make_plain_(const_cast<void*>(chunk_of(array)));
    check(to_dlpack_(array, &tensor));
  }
  return View(std::unique_ptr<void, Release>(tensor, Release{shared_from_this(), &Api::delete_dlpack_}));
}

void Api::wait_to_read(Handle array) const { check(wait_to_read_(array)); }

void Api::on_all_threads(const std::function<void(int thread, int threads)>& part) const {
  // A forked child has none of its parent's threads.
  if (parallel_ == nullptr || process_id() != owner_) return part(0, 1);
  const auto call = [&] { part(thread_(), threads_()); };
  parallel_([](void* with) { (*static_cast<decltype(&call)>(with))(); },
            const_cast<void*>(static_cast<const void*>(&call)), 0, 0);
}

void Api::push(std::shared_ptr<AsyncOp> op, std::vector<Handle> arrays, Place place, int priority,
               const char* name) const {
  void* function = version_ >= kVersion2 ? reinterpret_cast<void*>(&start_2) : reinterpret_cast<void*>(&start_1);
  auto pushed = std::make_shared<Pushed>(std::move(op));
  auto* parameter = new std::shared_ptr<Pushed>(pushed);
  const int status = push_async_(function, parameter, &drop, &kCpu, nullptr, 0, arrays.data(),
                                 static_cast<int>(arrays.size()), &property_of(place), priority, name, false);
  pushed->pushing = false;
  if (status == 0) {
    if (pushed->deleted && !pushed->started) pushed->op->skipped();
    return;
  }
  const Error error = last_error();
  // Depending on where MXNet refused, it has called the deleter or not.
  if (!pushed->deleted) delete parameter;
  if (!pushed->started) pushed->op->refused(error.what());
  throw error;
}

std::optional<DType> dtype_of(const View& view) {
  using Kind = View::Kind;
  const auto is = [&](Kind kind, int bits) { return view.kind() == kind && view.bits() == bits; };
  if (is(Kind::kFloat, 32)) return DType::kFloat32;
  if (is(Kind::kFloat, 16)) return DType::kFloat16;
  if (is(Kind::kFloat, 64)) return DType::kFloat64;
  if (is(Kind::kBFloat, 16)) return DType::kBFloat16;
  if (is(Kind::kInt, 8)) return DType::kInt8;
  if (is(Kind::kUInt, 8)) return DType::kUInt8;
  if (is(Kind::kInt, 32)) return DType::kInt32;
  if (is(Kind::kInt, 64)) return DType::kInt64;
  return std::nullopt;
}

std::string describe_unsupported(const View& view) {
  if (view.kind() == View::Kind::kUInt && view.bits() == 1) return "bool";
  const char* kind = view.kind() == View::Kind::kInt ? "int" : view.kind() == View::Kind::kUInt ? "uint" : "float";
  return kind + std::to_string(view.bits());
}

}  // namespace kvstore_hvd::mxnet
