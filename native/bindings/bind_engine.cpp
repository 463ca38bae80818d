#include <array>
#include <iterator>
#include <tuple>

#include "bindings/bind.hpp"
#include "engine/engine.hpp"
#include "shm/liveness.hpp"

namespace kvstore_hvd {
namespace {

// Of all ranks together. So little is over before the GIL could be given up and taken back.
constexpr std::size_t kQuickBytes = 256 << 10;

// A field of a request, by its name in Python.
struct Field {
  const char* name;
  void (*set)(Request&, const py::handle& value);
};

template <auto member>
void set_field(Request& request, const py::handle& value) {
  request.*member = value.cast<std::decay_t<decltype(request.*member)>>();
}

template <auto member>
void set_text(Request& request, const py::handle& value) {
  request.*member = text_of(value.cast<py::str>());
}

constexpr Field kFields[] = {
    {"collective",
     [](Request& r, const py::handle& value) {
       r.collective = value_of<Collective>(value.cast<std::string>(), kCollectives, "collective");
     }},
    {"name", set_field<&Request::name>},
    {"label", set_text<&Request::label>},
    {"inputs",
     [](Request& r, const py::handle& value) { r.inputs = cast_all<const void*>(value.cast<std::vector<Address>>()); }},
    {"outputs",
     [](Request& r, const py::handle& value) { r.outputs = cast_all<void*>(value.cast<std::vector<Address>>()); }},
    {"shape",
     [](Request& r, const py::handle& value) {
       r.shape = value.cast<std::vector<std::int64_t>>();
       r.count = 1;
       for (const std::int64_t extent : r.shape) r.count *= static_cast<std::size_t>(extent);
     }},
    {"dtype", [](Request& r, const py::handle& value) { r.dtype = dtype_of(value.cast<std::string>()); }},
    {"op", [](Request& r, const py::handle& value) { r.op = op_of(value.cast<std::string>()); }},
    {"prescale", set_field<&Request::prescale>},
    {"postscale", set_field<&Request::postscale>},
    {"root", set_field<&Request::root>},
    {"priority", set_field<&Request::priority>},
    {"parts",
     [](Request& r, const py::handle& value) {
       for (const auto& [rank, from, bytes, to] :
            value.cast<std::vector<std::tuple<int, std::size_t, std::size_t, std::size_t>>>()) {
         r.parts.push_back(Part{rank, from, bytes, to});
       }
     }},
    {"contributed", set_field<&Request::contributed>},
    {"weight", set_field<&Request::weight>},
    {"as_half", set_field<&Request::as_half>},
    {"group", set_field<&Request::group>},
    {"on_device", set_field<&Request::on_device>},
    {"failure", set_text<&Request::input_failure>},
};

// Takes fields in the order of the table, or by name, like a Python function.
std::shared_ptr<Request> make_request(const py::args& in_order, const py::kwargs& by_name) {
  // Strings of the interpreter's that are looked up without being hashed; never freed.
  static const auto* const names = [] {
    auto* made = new std::array<PyObject*, std::size(kFields)>();
    for (std::size_t i = 0; i < made->size(); ++i) (*made)[i] = PyUnicode_InternFromString(kFields[i].name);
    return made;
  }();
  auto request = std::make_shared<Request>();
  std::size_t place = 0;
  for (const py::handle value : in_order) {
    if (place == names->size()) throw py::type_error("a Request has no more fields");
    kFields[place++].set(*request, value);
  }
  std::size_t given = 0;
  for (; place < names->size(); ++place) {
    PyObject* value = PyDict_GetItemWithError(by_name.ptr(), (*names)[place]);
    if (value == nullptr) continue;
    kFields[place].set(*request, value);
    ++given;
  }
  if (given != by_name.size()) throw py::type_error("a Request has no such field, or has it twice");
  return request;
}

// The innermost frames of all Python threads. The GIL is held while they are looked at, so that none changes or ends:
// CPython 3.11 has crashed where Python code looked at those of a thread that runs.
class Frames {
 public:
  Frames() {
    if (collects_) collector_.attr("disable")();
    by_thread = py::module_::import("sys").attr("_current_frames")();
  }
  ~Frames() {
    by_thread = py::dict();
    if (collects_) collector_.attr("enable")();
  }
  static py::object module_of(const py::handle& frame) { return frame.attr("f_globals").attr("get")("__name__", ""); }

  py::dict by_thread;

 private:
  const py::module_ collector_ = py::module_::import("gc");  // which might run other code
  const bool collects_ = collector_.attr("isenabled")().cast<bool>();
};

// The innermost calls of a Python thread: file, line, function and module of each.
py::list calls_of(const py::int_& thread, std::size_t most) {
  const Frames frames;
  py::list calls;
  py::object frame = frames.by_thread.attr("get")(thread);
  while (!frame.is_none() && calls.size() < most) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    calls.append(py::make_tuple(code.attr("co_filename"), PyFrame_GetLineNumber(raw), code.attr("co_name"),
                                Frames::module_of(frame)));
    PyObject* const outer = reinterpret_cast<PyObject*>(PyFrame_GetBack(raw));
    frame = outer == nullptr ? py::object(py::none()) : py::reinterpret_steal<py::object>(outer);
  }
  return calls;
}

// The Python threads whose innermost call is one of a package, and whether the look before saw the same call. What it
// has seen it marks: no trace function gets the lines of that call any more.
std::vector<Activity::Caller> callers_of(const std::string& package) {
  const Frames frames;
  std::vector<Activity::Caller> all;
  for (const auto& [thread, frame] : frames.by_thread) {
    if (py::str(Frames::module_of(frame)).cast<std::string>().rfind(package + ".", 0) != 0) continue;
    all.emplace_back(thread.cast<unsigned long>(), !frame.attr("f_trace_lines").cast<bool>());
    frame.attr("f_trace_lines") = false;
  }
  return all;
}

// The last owner may be the garbage collector, and an engine that was not shut down waits for the other ranks when
// it goes: not with the GIL. (It may also be a thread of MXNet's, which has none.)
void delete_without_gil(Engine* engine) {
  std::optional<py::gil_scoped_release> release;
  if (PyGILState_Check() != 0) release.emplace();
  delete engine;
}

// A signal's exception (Ctrl-C) ends the world first: the arrays may be freed as soon as it leaves this function, and
// the engine must not write into them any more. `work`: what the caller waits for, or null.
[[noreturn]] void interrupt(Engine& engine, Work* work) {
  py::error_already_set interruption;
  without_gil([&] {
    engine.abort(engine.process(engine.rank()).text + " was interrupted");
    if (work != nullptr) engine.wait(*work);
  });
  throw interruption;
}

void wait(Engine& engine, Work& work, bool done = false) {
  while (!done) {
    done = without_gil([&] { return engine.wait(work, kSignalCheck); });
    if (!done && PyErr_CheckSignals() != 0) interrupt(engine, &work);
  }
  check(work.status());
}

// Keeps the GIL until something waits: another thread of this rank, or another rank, may be stopped with a lock.
class GilUntilBlocked final : public BlockingObserver {
 public:
  void about_to_block() noexcept override {
    if (!released_) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

// Until nothing of this rank is pending, or the time is over; returns whether nothing is.
bool wait_for_all(Engine& engine, double limit_s) {
  Patience patience(nanoseconds(limit_s));
  bool done = false;
  while (!done && !patience.is_over()) {
    done = without_gil([&] { return engine.wait_for_all(kSignalCheck); });
    if (!done && PyErr_CheckSignals() != 0) interrupt(engine, nullptr);
  }
  return done;
}

// `work` is null, or was run before and is over.
void run(Engine& engine, const std::shared_ptr<Request>& request, std::shared_ptr<Work>& work) {
  const auto submit = [&] {
    if (work) {
      engine.submit_to_wait(work);
    } else {
      work = engine.submit_to_wait(request);
    }
  };
  const bool quick = !request->on_device && bytes_of(*request) * static_cast<std::size_t>(engine.size()) <= kQuickBytes;
  bool done = false;
  if (quick) {
    const GilUntilBlocked gil;
    submit();
    done = engine.wait_briefly(*work);
  }
  if (!done) {
    // The GIL is given up once only where the others are quick.
    const py::gil_scoped_release release;
    if (!quick) submit();
    done = engine.wait(*work, kSignalCheck);
  }
  wait(engine, *work, done);
}

// A request that is run again and again. As a plain function of the interpreter's: for a small operation, what pybind11
// does for a call would be a good part of it.
struct Prepared {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Request> request;
  py::object result, owner;    // with the memory
  std::shared_ptr<Work> work;  // of a run that is over, or null
};

PyObject* run_prepared(PyObject* self, PyObject*) {
  try {
    auto& prepared = *static_cast<Prepared*>(PyCapsule_GetPointer(self, nullptr));
    // Threads that run it at the same time have one each. Not kept after an exception: it may still be under way.
    std::shared_ptr<Work> work = std::move(prepared.work);
    run(*prepared.engine, prepared.request, work);
    prepared.work = std::move(work);
    return py::object(prepared.result).release().ptr();
  } catch (const NativeError& error) {
    set_python_error(error.status);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

py::object prepare(std::shared_ptr<Engine> engine, std::shared_ptr<Request> request, py::object result,
                   py::object owner) {
  static PyMethodDef definition{"run", run_prepared, METH_NOARGS, nullptr};
  const py::capsule prepared(
      new Prepared{std::move(engine), std::move(request), std::move(result), std::move(owner), nullptr},
      [](void* self) { delete static_cast<Prepared*>(self); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, prepared.ptr()));
}

double seconds(std::chrono::nanoseconds duration) { return std::chrono::duration<double>(duration).count(); }

py::object report(const Engine& engine) {
  const EngineStatistics all = without_gil([&] { return engine.report(); });
  const py::object statistics = record("Statistics"), make_times = record("Times");
  const auto times = [&](const Times& of) {
    return make_times(seconds(of.queued), seconds(of.reducing), seconds(of.exposed));
  };
  py::dict names;
  for (const auto& [name, one] : all.names) {
    names[py::str(name)] = statistics(one.operations, one.bytes, name_of(one.algorithm), times(one.total),
                                      times(one.last), seconds(one.submitted.time_since_epoch()));
  }
  return record("EngineStatistics")(names, all.rounds.count, seconds(all.rounds.exposed), seconds(all.rounds.reducing));
}

std::int64_t clock_of(Clock::time_point time) { return std::chrono::nanoseconds(time.time_since_epoch()).count(); }

// What was recorded, and how many events were lost.
py::tuple take_timeline(Engine& engine) {
  const TimelineEvents taken = without_gil([&] { return engine.take_timeline(); });
  const py::object event = record("TimelineEvent");
  py::list events(taken.events.size());
  for (std::size_t i = 0; i < taken.events.size(); ++i) {
    const TimelineEvent& one = taken.events[i];
    events[i] =
        event(one.name, one.label, name_of(one.collective), name_of(one.algorithm), name_of(one.dtype), name_of(one.op),
              one.failed, one.begins_round, one.bytes, clock_of(one.submitted), clock_of(one.since),
              clock_of(one.scheduled), clock_of(one.completed), one.on_link.arrived - one.on_link.sent);
  }
  return py::make_tuple(events, taken.lost);
}

// As the two below with the GIL: nothing of it waits, and a thread that gives it up may not get it back at exit.
py::object waiting(const Engine& engine, double age_s) {
  const auto all = engine.waiting(nanoseconds(age_s));
  if (!all) return py::none();
  const py::object make = record("Waiting");
  py::list result;
  for (const Waiting& one : *all) {
    result.append(make(one.name, one.operation, seconds(one.waited), seconds(one.since.time_since_epoch()),
                       py::tuple(py::cast(one.blamed.ranks)), one.blamed.announced_by_all));
  }
  return result;
}

py::object missed(const Engine& engine, std::size_t most, bool described) {
  const auto all = engine.missed(most, described);
  if (!all) return py::none();
  const py::object make = record("Missed"), announced = record("Announced");
  py::list result;
  for (const Missed& one : *all) {
    py::object what = py::none();
    if (one.announced) {
      const Announced& told = *one.announced;
      what = announced(name_of(told.collective), name_of(told.dtype), name_of(told.op), told.prescale, told.postscale,
                       told.as_half, told.group, told.count, py::tuple(py::cast(told.shape)));
    }
    result.append(make(one.name, one.operation, what));
  }
  return result;
}

// Number, collective, operations; None where there is no batch.
py::object take_batch(Engine& engine, double limit_s) {
  const auto batch = without_gil([&] { return engine.take_batch(nanoseconds(limit_s)); });
  if (!batch) return py::none();
  const Reduction& how = batch->reduction;
  const py::object make = record("DeviceOperation");
  py::list operations;
  for (const DeviceOperation& one : batch->operations) {
    py::list parts;
    for (const Part& part : one.parts) parts.append(py::make_tuple(part.rank, part.from, part.bytes, part.to));
    operations.append(make(one.name, one.label, cast_all<Address>(one.inputs), cast_all<Address>(one.outputs),
                           one.count, one.contributed, parts, name_of(how.dtype), name_of(how.op), how.prescale,
                           how.postscale, how.as_half, batch->root));
  }
  return py::make_tuple(batch->number, name_of(batch->collective), operations);
}

bool end_batch(Engine& engine, std::uint64_t number, const py::object& error) {
  const Status status = error.is_none() ? Status() : loss_by(error);
  return without_gil([&] { return engine.end_batch(number, status); });
}

py::tuple process(const Engine& engine, int rank) {
  if (rank < 0 || rank >= engine.size()) throw py::value_error("no such rank in the segment");
  const Engine::Process process = engine.process(rank);
  return py::make_tuple(process.pid, text_of(process.text));
}

}  // namespace

void bind_engine(py::module_& module) {
  module.def("calls_of", &calls_of, py::arg("thread"), py::arg("most"));
  module.def("callers_of", &callers_of, py::arg("package"));
  module.def("has_pidfds", &Liveness::has_pidfds, "Whether the deaths of other processes are noticed at once.");
  module.def("end_as_failed", &end_as_failed, "Have this process, which ends, end with code 1 instead of 0.");
  py::class_<Work, std::shared_ptr<Work>>(module, "Work", "The handle of a submitted request.")
      .def_property_readonly("done", &Work::done)
      .def_property_readonly(
          "error", [](const Work& work) { return work.done() ? exception_of(work.status()) : py::object(py::none()); });
  py::class_<Request, std::shared_ptr<Request>>(
      module, "Request", "A collective operation on raw addresses; may be submitted any number of times.")
      .def(py::init(&make_request));

  py::class_<Activity, std::shared_ptr<Activity>>(module, "Activity", "What a process is doing, of all its engines.")
      .def(py::init<>());
  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine", "The engine of one rank.")
      .def(py::init([](std::shared_ptr<Segment> segment, int rank, double timeout_s, bool watch_peers,
                       const py::str& host, bool waits_for_busy, std::shared_ptr<Activity> activity) {
             if (!activity) activity = std::make_shared<Activity>();
             EngineOptions options{nanoseconds(timeout_s), waits_for_busy, std::move(activity), watch_peers,
                                   text_of(host)};
             if (rank < 0 || rank >= segment->size()) throw py::value_error("no such rank in the segment");
             const py::gil_scoped_release release;  // it waits for the other ranks
             return std::shared_ptr<Engine>(new Engine(std::move(segment), rank, std::move(options)),
                                            &delete_without_gil);
           }),
           py::arg("segment"), py::arg("rank"), py::arg("timeout_s"), py::arg("watch_peers") = true,
           py::arg("host") = "", py::arg("waits_for_busy") = false, py::arg("activity") = nullptr)
      .def("protect", &Engine::protect, py::arg("arena"), WithoutGil())
      .def_property_readonly("rank", &Engine::rank)
      .def_property_readonly("size", &Engine::size)
      .def_property_readonly("bytes_in_place", &Engine::bytes_in_place)
      .def(
          "submit", [](Engine& engine, std::shared_ptr<Request> request) { return engine.submit(std::move(request)); },
          py::arg("request"), WithoutGil())
      .def(
          "run",
          [](Engine& engine, const std::shared_ptr<Request>& request) {
            std::shared_ptr<Work> work;
            run(engine, request, work);
          },
          py::arg("request"))
      .def("prepare", &prepare, py::arg("request"), py::arg("result"), py::arg("owner"),
           "A function without arguments that runs the request and returns the result.")
      .def(
          "wait", [](Engine& engine, Work& work) { wait(engine, work); }, py::arg("work"))
      .def("wait_for_all", &wait_for_all, py::arg("limit_s"))
      .def(
          "abort",
          [](Engine& engine, const py::str& text) { without_gil([&, fact = text_of(text)] { engine.abort(fact); }); },
          py::arg("text"))
      .def("is_met", &Engine::is_met, py::arg("work"), WithoutGil())
      .def("health", [](const Engine& engine) { return exception_of(engine.health()); })
      .def("report", &report)
      .def("start_timeline", &Engine::start_timeline, py::arg("capacity"), WithoutGil())
      .def("stop_timeline", &Engine::stop_timeline, WithoutGil())
      .def("take_timeline", &take_timeline)
      .def("waiting", &waiting, py::arg("age_s"))
      .def("missed", &missed, py::arg("most"), py::arg("described") = false)
      .def("take_batch", &take_batch, py::arg("limit_s"))
      .def("end_batch", &end_batch, py::arg("number"), py::arg("error") = py::none())
      .def("process", &process, py::arg("rank"))
      .def_property_readonly("segment", &Engine::segment)
      .def("counts", &Engine::counts)
      .def(
          "tell_line",
          [](Engine& engine, const py::str& line, const std::vector<Activity::Caller>& callers, bool is_blocked) {
            engine.tell_line(text_of(line), callers, is_blocked);
          },
          py::arg("line"), py::arg("callers"), py::arg("is_blocked"))
      .def(
          "shutdown",
          [](Engine& engine, const py::str& reason) {
            return without_gil([&, why = text_of(reason)] { return engine.shutdown(why); });
          },
          py::arg("reason") = "");
}

}  // namespace kvstore_hvd
