#include <pybind11/stl.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "base/running_time.hpp"
#include "bindings/bind.hpp"
#include "bindings/errors.hpp"
#include "link/loop.hpp"
#include "link/transport.hpp"

namespace py = pybind11;

namespace kvstore_hvd {
namespace {

constexpr std::chrono::milliseconds kLook{100};  // at a clock, see Patience

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

MpiFunctions functions_of(const py::dict& values) {
  const auto get = [&](const char* name) { return values[name].cast<std::uintptr_t>(); };
  return {get("MPI_Isend"),  get("MPI_Irecv"),     get("MPI_Test"), get("MPI_Cancel"),
          get("MPI_Iprobe"), get("MPI_Get_count"), get("byte")};
}

}  // namespace

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
             if (!missing.empty() && has_failed) raise(Status(link->failure().code(), link->failure().fact()));
             return missing;
           })
      .def("give_up", &Link::give_up);
  module.def(
      "stop_links", [](double limit_s) { return LinkLoop::of_this_process().stop(nanoseconds(limit_s)); },
      py::arg("limit_s"), py::call_guard<py::gil_scoped_release>());
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

}  // namespace kvstore_hvd
