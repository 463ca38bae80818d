#include <pybind11/stl.h>

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bind.hpp"
#include "bindings/errors.hpp"
#include "bindings/names.hpp"
#include "mxnet/adapter.hpp"
#include "mxnet/local_reduction.hpp"

namespace py = pybind11;

namespace kvstore_hvd {
namespace {

using mxnet::LocalReductions;
using mxnet::MXNetAdapter;
using mxnet::Step;
// An NDArrayHandle as Python has it: `array.handle.value`.
using Address = std::uintptr_t;

mxnet::Handle handle(Address address) { return reinterpret_cast<mxnet::Handle>(address); }

std::vector<mxnet::Handle> handles(const std::vector<Address>& addresses) {
  std::vector<mxnet::Handle> result;
  result.reserve(addresses.size());
  for (const Address address : addresses) result.push_back(handle(address));
  return result;
}

void check(const Status& status) {
  if (!status.ok()) raise(status);
}

}  // namespace

void bind_mxnet(py::module_& module) {
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Step, std::shared_ptr<Step>>(module, "Step", "The gradients of a Trainer's step.");
  py::class_<LocalReductions>(module, "LocalReductions", "Reductions of one rank's own MXNet arrays.")
      .def(py::init<const std::string&, bool>(), py::arg("library_path"), py::arg("naive"))
      .def(
          "reduce",
          [](const LocalReductions& local, const std::vector<Address>& inputs, Address output, double prescale,
             double postscale) {
            check(
                local.reduce(handles(inputs), handle(output), {DType::kFloat32, ReduceOp::kSum, prescale, postscale}));
          },
          py::arg("inputs"), py::arg("output"), py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, WithoutGil());
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
            check(adapter.pushpull(name, label, handles(inputs), handles(outputs), prescale, postscale, priority, group,
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
            std::optional<std::size_t> bytes;
            check(adapter.pushpull_in_place(name, label, handle(array), prescale, postscale, priority, how, bytes));
            return bytes;
          },
          py::arg("name"), py::arg("label"), py::arg("array"), py::arg("priority"), py::arg("as_half") = false,
          py::arg("op") = "sum", py::arg("prescale") = 1.0, py::arg("postscale") = 1.0)
      .def(
          "prepare",
          [](const MXNetAdapter& adapter,
             const std::vector<std::tuple<std::string, std::string, Address, int>>& gradients) {
            std::vector<MXNetAdapter::ToSum> arrays;
            arrays.reserve(gradients.size());
            for (const auto& [name, label, array, priority] : gradients) {
              arrays.push_back({name, label, handle(array), priority});
            }
            return std::const_pointer_cast<Step>(adapter.prepare(arrays));
          },
          py::arg("gradients"), WithoutGil())
      .def(
          "pushpull_step",
          [](MXNetAdapter& adapter, const Step& step, bool as_half, const std::string& op, double weight) {
            const mxnet::StepReduction how{op_of(op), as_half, weight};
            const py::gil_scoped_release release;
            check(adapter.pushpull(step, how));
          },
          py::arg("step"), py::arg("as_half") = false, py::arg("op") = "sum", py::arg("weight") = 1.0)
      .def(
          "broadcast",
          [](MXNetAdapter& adapter, const std::string& name, const std::string& label, Address array, int root,
             int priority) { check(adapter.broadcast(name, label, handle(array), root, priority)); },
          py::arg("name"), py::arg("label"), py::arg("array"), py::arg("root") = 0, py::arg("priority") = 0,
          WithoutGil())
      .def(
          "await_turn",
          [](MXNetAdapter& adapter, const std::string& name) {
            const std::future<void> turn = adapter.await_turn(name);
            for (;;) {
              {
                const py::gil_scoped_release release;
                if (turn.wait_for(kSignalCheck) == std::future_status::ready) return;
              }
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
            return reinterpret_cast<std::uintptr_t>(MXNetAdapter::chunk_id(handle(array)));
          },
          py::arg("array"))
      .def("take_unread_error",
           [](MXNetAdapter& adapter) {
             Status status;
             {
               const py::gil_scoped_release release;
               status = adapter.take_unread_error();
             }
             return exception_of(status);
           })
      .def("after_fork_in_child", &MXNetAdapter::after_fork_in_child);
}

}  // namespace kvstore_hvd
