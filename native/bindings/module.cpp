// The module: errors, segments, arenas, reductions, links and the adapter to MXNet. The engine: bind_engine.cpp.
#include <unistd.h>

#include <array>
#include <cmath>
#include <functional>
#include <future>
#include <system_error>
#include <thread>
#include <tuple>

#include "bindings/bind.hpp"
#include "link/loop.hpp"
#include "mxnet/adapter.hpp"
#include "mxnet/local.hpp"

namespace kvstore_hvd {
namespace {

// The classes by their codes; never freed, since errors may come as the interpreter ends.
std::array<py::handle, kErrorCodes> classes;

py::handle class_of(ErrorCode code) { return classes[static_cast<std::size_t>(code)]; }

}  // namespace

std::string text_of(const py::str& text) {
  const auto bytes =
      py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes) throw py::error_already_set();
  return bytes;
}

py::str text_of(const std::string& text) {
  const auto decoded = py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  if (!decoded) throw py::error_already_set();
  return decoded;
}

py::object exception_of(const Status& status) {
  return status.ok() ? py::object(py::none()) : class_of(status.code())(text_of(status.text()));
}

void set_python_error(const Status& status) {
  try {
    PyErr_SetObject(class_of(status.code()).ptr(), exception_of(status).ptr());
  } catch (py::error_already_set& failure) {
    failure.restore();
  }
}

Status loss_by(const py::handle& error) {
  ErrorCode found = ErrorCode::kTransport;
  for (const ErrorCode code : {ErrorCode::kPeerLost, ErrorCode::kTimeout}) {
    if (py::isinstance(error, class_of(code))) found = code;
  }
  return Status(found, text_of(py::str(error)));
}

namespace {

void bind_errors() {
  const py::module_ errors = py::module_::import("kvstore_hvd.errors");
  for (std::size_t code = 0; code < classes.size(); ++code) {
    classes[code] = py::object(errors.attr(class_name(static_cast<ErrorCode>(code)))).release();
  }
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const NativeError& error) {
      set_python_error(error.status);
    } catch (const std::system_error& error) {
      // An OSError, whose number tells what helps: the caller in Python explains it to the user.
      const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });
}

void bind_reduce(py::module_& module) {
  module.def("simd_target", &simd_target, "The instruction set in use: scalar, avx2 or avx512.");
  module.def("set_simd_target", &set_simd_target, py::arg("target"),
             "Choose the instruction set; False, and no change, when the CPU or the build lacks it.");
  module.def(
      "scale",
      [](const std::string& dtype, Address input, Address output, std::size_t count, double prescale,
         double postscale) {
        const void* from = reinterpret_cast<const void*>(input);
        void* to = reinterpret_cast<void*>(output);
        reduce({dtype_of(dtype), ReduceOp::kSum, prescale, postscale}, &from, 1, &to, 1, count);
      },
      py::arg("dtype"), py::arg("source"), py::arg("target"), py::arg("count"), py::arg("prescale"),
      py::arg("postscale"), WithoutGil(), "One array times both factors.");
}

void bind_segment(py::module_& module) {
  py::class_<Segment, std::shared_ptr<Segment>>(module, "Segment", "The shared memory of one world on one host.")
      .def_static(
          "create",
          [](int size, std::size_t arena_bytes, const std::string& thresholds, std::uint32_t set_number,
             int size_of_all, std::vector<int> ranks, std::optional<bool> has_core_for_each, int host,
             std::vector<std::vector<int>> hosts, const std::vector<std::pair<py::str, int>>& processes,
             const std::string& job, int generation) {
            Hosts all{host, std::move(hosts), {}};
            for (const auto& [name, pid] : processes) all.processes.emplace_back(text_of(name), pid);
            auto segment = Segment::create(size, arena_bytes, parse_thresholds(thresholds),
                                           Inside{set_number, size_of_all, std::move(ranks)}, has_core_for_each, all);
            World& world = segment->world();
            world.generation = generation;
            job.copy(world.job, sizeof(world.job) - 1);
            return segment;
          },
          py::arg("size"), py::arg("arena_bytes") = 0, py::arg("thresholds") = "", py::arg("set_number") = 0,
          py::arg("size_of_all") = 0, py::arg("ranks") = std::vector<int>{},
          py::arg("has_core_for_each").none(true) = py::none(), py::arg("host") = 0,
          py::arg("hosts") = std::vector<std::vector<int>>{},
          py::arg("processes") = std::vector<std::pair<py::str, int>>{}, py::arg("job") = "", py::arg("generation") = 0)
      .def_static("attach", &Segment::attach, py::arg("fd"))
      .def_property_readonly("fd", &Segment::fd)
      .def_property_readonly("size", &Segment::size)
      .def("snapshot", &snapshot, py::arg("most") = 0)
      // Whether this call is the first one of the host's processes.
      .def("claim_failure", [](Segment& segment) { return segment.world().is_told.exchange(1) == 0; })
      .def_property_readonly("has_core_for_each",
                             [](const Segment& segment) { return segment.world().has_core_for_each != 0; });
  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena", "Memory for arrays that other ranks use in place.")
      .def(py::init<std::shared_ptr<Segment>, int>(), py::arg("segment"), py::arg("rank"))
      .def("allocate", [](Arena& arena, std::size_t bytes) { return reinterpret_cast<Address>(arena.allocate(bytes)); })
      .def("free", [](Arena& arena, Address memory) { arena.free(reinterpret_cast<void*>(memory)); })
      .def("retire", &Arena::retire, WithoutGil())
      .def("contains",
           [](const Arena& arena, Address memory) { return arena.contains(reinterpret_cast<const void*>(memory)); })
      .def_property_readonly("capacity", &Arena::capacity)
      .def_property_readonly("used", &Arena::used)
      .def("after_fork_in_child", &Arena::after_fork_in_child);
  // By name, the values with `text`. Raises ValueError.
  module.def(
      "thresholds",
      [](const std::string& text) {
        const Thresholds thresholds = parse_thresholds(text);
        const py::object threshold = record("Threshold");
        py::dict all;
        for (const ThresholdInfo& info : threshold_infos()) {
          all[info.name] = threshold(thresholds.*info.field, info.unit, info.least, info.most);
        }
        return all;
      },
      py::arg("text") = "");
  module.def("abi", &Segment::abi, "What must be equal for two builds to share a segment.");
}

constexpr std::chrono::milliseconds kLook{100};  // at a clock, see Patience

MpiFunctions functions_of(const py::dict& values) {
  const auto get = [&](const char* name) { return values[name].cast<std::uintptr_t>(); };
  return {get("MPI_Isend"),  get("MPI_Irecv"),     get("MPI_Test"), get("MPI_Cancel"),
          get("MPI_Iprobe"), get("MPI_Get_count"), get("byte")};
}

void bind_link(py::module_& module) {
  py::class_<Transport, std::shared_ptr<Transport>>(module, "Transport", "Messages between hosts.");
  module.def(
      "mpi_transport",
      [](const py::dict& functions, std::uintptr_t communicator, std::vector<int> ranks, int first_tag) {
        return mpi_transport(functions_of(functions), communicator, std::move(ranks), first_tag);
      },
      py::arg("functions"), py::arg("communicator"), py::arg("ranks"), py::arg("first_tag"));
  module.def("tcp_transport", &tcp_transport, py::arg("connections"));
  py::class_<Link, std::shared_ptr<Link>>(module, "Link", "Moves bytes between this host and the others.")
      .def(py::init([](std::shared_ptr<Segment> segment, std::shared_ptr<Transport> transport, double timeout_s,
                       double silence_s, const std::string& build, int dtype) {
             const LinkOptions options{nanoseconds(timeout_s), nanoseconds(silence_s), std::hash<std::string>()(build),
                                       static_cast<DType>(dtype)};
             auto link = std::make_shared<Link>(std::move(segment), std::move(transport), options);
             LinkLoop::of_this_process().add(link);
             return link;
           }),
           py::arg("segment"), py::arg("transport"), py::arg("timeout_s"), py::arg("silence_s"), py::arg("build"),
           py::arg("dtype"))
      .def("missing",
           [](const std::shared_ptr<Link>& link) {
             // First: a world that has failed since all hosts have met is joined, and lost.
             const bool has_failed = link->failure().is_set();
             std::vector<int> missing = link->missing();
             if (!missing.empty() && has_failed) check(Status(link->failure().code(), link->failure().fact()));
             return missing;
           })
      .def("give_up", &Link::give_up);
  module.def(
      "stop_links", [](double limit_s) { return LinkLoop::of_this_process().stop(nanoseconds(limit_s)); },
      py::arg("limit_s"), WithoutGil());
  module.def(
      "end_within",
      [](double limit_s, const std::string& text) {
        std::thread([limit = nanoseconds(limit_s), text] {
          for (Patience patience(limit); !patience.is_over();) std::this_thread::sleep_for(kLook);
          [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
          _exit(1);
        }).detach();
      },
      py::arg("limit_s"), py::arg("text"));
}

using mxnet::LocalOperations;
using mxnet::MXNetAdapter;
using mxnet::Step;

// An address is an NDArrayHandle as Python has it: `array.handle.value`.
mxnet::Handle handle(Address address) { return reinterpret_cast<mxnet::Handle>(address); }

// Of what depends on the arrays nothing is set.
Request request_of(const std::string& name, const std::string& label, int priority, double prescale = 1.0,
                   double postscale = 1.0) {
  Request request;
  request.name = name;
  request.label = label;
  request.priority = priority;
  request.prescale = prescale;
  request.postscale = postscale;
  return request;
}

void bind_mxnet(py::module_& module) {
  py::class_<Step, std::shared_ptr<Step>>(module, "Step", "The gradients of a Trainer's step.");
  py::class_<LocalOperations>(module, "LocalOperations", "Operations on one rank's own MXNet arrays.")
      .def(py::init<const std::string&, bool>(), py::arg("library_path"), py::arg("naive"))
      .def(
          "reduce",
          [](const LocalOperations& local, const std::vector<Address>& inputs, Address output, double prescale,
             double postscale) {
            check(local.reduce(cast_all<mxnet::Handle>(inputs), handle(output),
                               {DType::kFloat32, ReduceOp::kSum, prescale, postscale}));
          },
          py::arg("inputs"), py::arg("output"), py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, WithoutGil())
      .def(
          "update",
          [](const LocalOperations& local, const std::string& name, int rule, const std::vector<Address>& arrays,
             const std::vector<std::array<float, 12>>& how, bool is_mixed, Address scale) {
            const auto handles = cast_all<mxnet::Handle>(arrays);
            if (!local.applies(handles, how.size(), is_mixed, handle(scale))) return false;
            std::vector<Hyperparameters> each;
            for (const auto& [lr, wd, eta, step, rescale, clip, momentum, beta1, beta2, epsilon, lower, upper] : how) {
              const auto bias = [step = step](float beta) { return step > 0 ? 1.0F - std::pow(beta, step) : 1.0F; };
              each.push_back({lr, wd, eta, rescale, clip, momentum, beta1, beta2, epsilon, lower, upper, bias(beta1),
                              bias(beta2)});
            }
            check(local.update(static_cast<Rule>(rule), handles, std::move(each), is_mixed, handle(scale), name));
            return true;
          },
          py::arg("name"), py::arg("rule"), py::arg("arrays"), py::arg("how"), py::arg("is_mixed"), py::arg("scale"),
          WithoutGil(), "Whether MXNet's operator `name` is carried out: False for arrays that it does not take.");
  py::class_<MXNetAdapter>(module, "MXNetAdapter", "Collective operations on MXNet arrays, through MXNet's engine.")
      .def(py::init<std::shared_ptr<Engine>, const std::string&, bool, std::shared_ptr<Arena>>(), py::arg("engine"),
           py::arg("library_path"), py::arg("naive") = false, py::arg("arena").none(true) = nullptr)
      .def(
          "pushpull",
          [](MXNetAdapter& adapter, const std::string& name, const std::string& label,
             const std::vector<Address>& inputs, const std::vector<Address>& outputs, const std::string& op,
             double prescale, double postscale, int priority, bool as_half, double weight, std::uint64_t group) {
            const mxnet::StepReduction how{op_of(op), as_half, weight};
            const py::gil_scoped_release release;
            Request request = request_of(name, label, priority, prescale, postscale);
            request.group = group;
            check(adapter.push(std::move(request), cast_all<mxnet::Handle>(inputs), cast_all<mxnet::Handle>(outputs),
                               how));
          },
          py::arg("name"), py::arg("label"), py::arg("inputs"), py::arg("outputs"), py::arg("op") = "sum",
          py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("priority") = 0, py::arg("as_half") = false,
          py::arg("weight") = 1.0, py::arg("group") = 0)
      .def(
          "pushpull_in_place",
          [](MXNetAdapter& adapter, const std::string& name, const std::string& label, Address array, int priority,
             bool as_half, const std::string& op, double prescale, double postscale) {
            const mxnet::StepReduction how{op_of(op), as_half};
            const py::gil_scoped_release release;
            Request request = request_of(name, label, priority, prescale, postscale);
            std::optional<std::size_t> bytes;
            check(adapter.push_in_place(std::move(request), handle(array), how, bytes));
            return bytes;
          },
          py::arg("name"), py::arg("label"), py::arg("array"), py::arg("priority"), py::arg("as_half") = false,
          py::arg("op") = "sum", py::arg("prescale") = 1.0, py::arg("postscale") = 1.0)
      .def(
          "prepare",
          [](const MXNetAdapter& adapter, const std::vector<MXNetAdapter::ToSum>& gradients) {
            return std::const_pointer_cast<Step>(adapter.prepare(gradients));
          },
          py::arg("gradients"), WithoutGil())
      .def(
          "pushpull_step",
          [](MXNetAdapter& adapter, const Step& step, bool as_half, const std::string& op, double weight) {
            const mxnet::StepReduction how{op_of(op), as_half, weight};
            check(without_gil([&] { return adapter.push(step, how); }));
          },
          py::arg("step"), py::arg("as_half") = false, py::arg("op") = "sum", py::arg("weight") = 1.0)
      .def(
          "broadcast",
          [](MXNetAdapter& adapter, const std::string& name, const std::string& label, Address array, int root,
             int priority) {
            Request request = request_of(name, label, priority);
            request.collective = Collective::kBroadcast;
            request.root = root;
            check(adapter.push(std::move(request), {handle(array)}, {handle(array)}, {}));
          },
          py::arg("name"), py::arg("label"), py::arg("array"), py::arg("root") = 0, py::arg("priority") = 0,
          WithoutGil())
      .def(
          "exchange",
          [](MXNetAdapter& adapter, const std::string& name, const std::string& label, Address source, Address target,
             std::size_t count, std::size_t contributed,
             const std::vector<std::tuple<int, std::size_t, std::size_t, std::size_t>>& parts, int priority) {
            Request request = request_of(name, label, priority);
            request.collective = Collective::kExchange;
            request.count = count;
            request.shape = {static_cast<std::int64_t>(count)};
            request.contributed = contributed;
            for (const auto& [rank, from, bytes, to] : parts) request.parts.push_back({rank, from, bytes, to});
            check(adapter.push(std::move(request), {handle(source)}, {handle(target)}, {}));
          },
          py::arg("name"), py::arg("label"), py::arg("source"), py::arg("target"), py::arg("count"),
          py::arg("contributed"), py::arg("parts"), py::arg("priority"), WithoutGil())
      .def(
          "await_turn",
          [](MXNetAdapter& adapter, const std::string& name) {
            const std::future<void> turn = adapter.await_turn(name);
            while (without_gil([&] { return turn.wait_for(kSignalCheck); }) != std::future_status::ready) {
              if (PyErr_CheckSignals() != 0) throw py::error_already_set();
            }
          },
          py::arg("name"))
      .def(
          "new_array",
          [](const MXNetAdapter& adapter, const std::vector<std::int64_t>& shape, const std::string& dtype) {
            const std::optional<DType> known = find_value<DType>(dtype, kDTypes);
            return known ? reinterpret_cast<Address>(adapter.new_array(shape, *known)) : 0;
          },
          py::arg("shape"), py::arg("dtype"), WithoutGil())
      .def(
          "is_dense", [](const MXNetAdapter& adapter, Address array) { return adapter.is_dense(handle(array)); },
          py::arg("array"))
      .def(
          "is_plain", [](const MXNetAdapter& adapter, Address array) { return adapter.is_plain(handle(array)); },
          py::arg("array"))
      .def(
          "chunk_id",
          [](const MXNetAdapter&, Address array) {
            return reinterpret_cast<Address>(mxnet::Api::chunk_of(handle(array)));
          },
          py::arg("array"))
      .def("take_unread_error",
           [](MXNetAdapter& adapter) { return exception_of(without_gil([&] { return adapter.take_unread_error(); })); })
      .def("after_fork_in_child", &MXNetAdapter::after_fork_in_child);
}

}  // namespace
}  // namespace kvstore_hvd

PYBIND11_MODULE(_native, module) {
  module.doc() = "The native engine; imported by kvstore_hvd.native only.";
  kvstore_hvd::bind_errors();
  kvstore_hvd::bind_segment(module);
  kvstore_hvd::bind_engine(module);
  kvstore_hvd::bind_reduce(module);
  kvstore_hvd::bind_link(module);
  kvstore_hvd::bind_mxnet(module);
}
