#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "bindings.h"
#include "engine_object.h"
#include "errors.h"
#include "faults_object.h"
#include "interruptible.h"
#include "python_log.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

void create(EngineObject* self, nb::handle backend, nb::handle lanes, nb::handle queue_depth,
            nb::handle block_bytes, nb::handle pinned_budget_bytes, nb::handle gpu, nb::handle faults,
            nb::handle path) {
  EngineOptions options;
  options.backend = backend_argument(backend);
  options.lanes = optional_count_argument(lanes, "lanes", 1, 64);
  options.queue_depth = optional_count_argument(queue_depth, "queue_depth", 1, 4096);
  options.block_bytes = optional_size_argument(block_bytes, "block_bytes");
  options.pinned_budget_bytes = optional_size_argument(pinned_budget_bytes, "pinned_budget_bytes");
  options.gpu = gpu_path_argument(gpu);
  if (!faults.is_none()) {
    if (!nb::isinstance<FaultsObject>(faults)) {
      raise_type_error("faults: must be trunkline.Faults or None, not " + shown_type(faults));
    }
    options.faults = nb::cast<FaultsObject&>(faults).faults;
  }
  if (!path.is_none()) {
    const bool is_list = nb::isinstance<nb::list>(path) || nb::isinstance<nb::tuple>(path);
    options.paths = is_list ? paths_argument(path, "path") : std::vector{path_argument(path, "path")};
  }
  adopt_log_levels();
  new (self) EngineObject(unwrap(call_interruptibly([options] { return Engine::create(options); })));
}

nb::dict latency(const LatencyHistogram& histogram) {
  nb::dict dict;
  dict["count"] = histogram.count();
  dict["mean_ns"] = histogram.mean_ns();
  dict["p50_ns"] = histogram.percentile(50);
  dict["p99_ns"] = histogram.percentile(99);
  return dict;
}

nb::dict stats(const EngineObject& self) {
  const EngineStats stats = [&] {
    const GilReleased unlocked;
    return self.engine.stats();
  }();
  nb::dict bytes;
  bytes["direct"] = stats.bytes_direct;
  bytes["bounced"] = stats.bytes_bounced;
  bytes["buffered"] = stats.bytes_buffered;
  bytes["gds"] = stats.bytes_gds;
  nb::dict dict;
  dict["bytes"] = bytes;
  dict["operations"] = stats.operations;
  dict["transfers"] = stats.transfers;
  dict["inline_operations"] = stats.inline_operations;
  dict["retries"] = stats.retries;
  dict["short_resumes"] = stats.short_resumes;
  dict["direct_refusals"] = stats.direct_refusals;
  dict["errors"] = stats.errors;
  dict["pinned_bytes"] = stats.pinned_bytes;
  dict["peak_pinned_bytes"] = stats.peak_pinned_bytes;
  dict["read_latency"] = latency(stats.read_latency);
  dict["write_latency"] = latency(stats.write_latency);
  return dict;
}

nb::dict explain(const EngineObject& self, nb::handle path_value) {
  const std::string path = path_argument(path_value, "path");
  const Explanation explanation =
      unwrap(call_interruptibly([engine = self.engine, path] { return engine.explain(path); }));
  nb::dict alignment;
  alignment["memory"] = explanation.memory_alignment;
  alignment["offset"] = explanation.offset_alignment;
  nb::list refused;
  for (const Refusal& refusal : explanation.refused) {
    nb::dict entry;
    entry["what"] = refusal.what;
    entry["why"] = decode_path(refusal.why);
    refused.append(entry);
  }
  nb::dict dict;
  dict["backend"] = explanation.backend;
  dict["direct"] = explanation.direct;
  dict["why"] = decode_path(explanation.why);
  dict["alignment"] = alignment;
  dict["device"] = decode_path(explanation.device);
  dict["filesystem"] = explanation.filesystem;
  dict["mount"] = decode_path(explanation.mount);
  nb::dict gpu;
  gpu["path"] = explanation.gpu;
  gpu["why"] = explanation.gpu_why;
  dict["gpu"] = gpu;
  nb::dict tuning;
  tuning["in_effect"] = explanation.tuning.in_effect;
  tuning["time"] = explanation.tuning.time;
  tuning["settings"] = explanation.tuning.settings;
  tuning["why"] = decode_path(explanation.tuning.why);
  dict["tuning"] = tuning;
  dict["refused"] = refused;
  return dict;
}

void close(const EngineObject& self) {
  unwrap(call_interruptibly([engine = self.engine]() -> Status {
    engine.close();
    return {};
  }));
}

std::string repr(const EngineObject& self) {
  const EngineConfig& config = self.engine.config();
  return "<trunkline.Engine backend='" + std::string(to_string(config.backend)) +
         "' lanes=" + std::to_string(config.lanes) + " queue_depth=" + std::to_string(config.queue_depth) +
         " block_bytes=" + std::to_string(config.block_bytes) + ">";
}

EngineObject* default_engine() {
  adopt_log_levels();
  Result<Engine> engine = [] {
    const GilReleased unlocked;
    return Engine::default_engine();
  }();
  return new EngineObject(unwrap(std::move(engine)));
}

template <class T>
auto config_member(T EngineConfig::* member) {
  return [member](const EngineObject& self) { return self.engine.config().*member; };
}

}  // namespace

std::optional<Engine> engine_argument(nb::handle value) {
  if (value.is_none()) return std::nullopt;
  if (!nb::isinstance<EngineObject>(value)) {
    raise_type_error("engine: must be trunkline.Engine or None, not " + shown_type(value));
  }
  return nb::cast<EngineObject&>(value).engine;
}

Engine engine_or_default(nb::handle value) {
  std::optional<Engine> engine = engine_argument(value);
  if (engine) return *engine;
  const GilReleased unlocked;
  Result<Engine> process_engine = Engine::default_engine();
  if (!process_engine) {
    nb::gil_scoped_acquire locked;
    raise(process_engine.error());
  }
  return *process_engine;
}

void register_engine(nb::module_& module) {
  nb::class_<EngineObject>(
      module, "Engine", nb::is_weak_referenceable(),
      "I/O lanes that all files of the engine share. Thread-safe; a context manager that closes.\n\n"
      "backend: \"io_uring\", \"libaio\" or \"threads\" (Unsupported is raised if it does not work), "
      "\"auto\"\n"
      "(the first of them that a probe finds working) or \"memory\" (files exist only in this process, for\n"
      "tests). lanes: I/O threads, from 1 to 64. queue_depth: transfers in flight per lane, from 1 to 4096.\n"
      "block_bytes: largest transfer, a\n"
      "multiple of 4096. pinned_budget_bytes: hard limit for the page-locked memory of the engine. Sizes "
      "are\n"
      "ints or strings such as \"4MiB\"; for None the engine chooses. gpu: the I/O path for the memory of "
      "GPUs,\n"
      "\"bounce\" (copied through pinned buffers), \"gds\" (GPUDirect Storage; operations fail where it does "
      "not\n"
      "work) or \"auto\" (GPUDirect Storage where a probe shows that it is direct). faults: injected into\n"
      "completions. path: what the engine will work on, a file or directory, or a list of the directories of "
      "a\n"
      "volume.\n\n"
      "Arguments that are None, and backend \"auto\", follow what `trunkline tune` measured, if anything: "
      "block\n"
      "size and direct I/O by the filesystem and device of each file; backend, lanes and queue depth by "
      "those "
      "of\n"
      "`path`, or without it by what all of the user's tunings of this machine agree on.\n\n"
      "An engine cannot be used after a fork: a child creates its own, or uses the default engine.")
      .def("__init__", &create, "backend"_a.none() = "auto", "lanes"_a = nb::none(),
           "queue_depth"_a = nb::none(), "block_bytes"_a = nb::none(), "pinned_budget_bytes"_a = nb::none(),
           "gpu"_a.none() = "auto", "faults"_a = nb::none(), "path"_a = nb::none(),
           nb::sig(
               "def __init__(self, backend: typing.Literal['auto', 'io_uring', 'libaio', 'threads', "
               "'memory'] = 'auto', "
               "lanes: int | None = None, queue_depth: int | None = None, block_bytes: int | str | None "
               "= None, "
               "pinned_budget_bytes: int | str | None = None, gpu: typing.Literal['auto', 'gds', 'bounce'] = "
               "'auto', faults: Faults | None = None, "
               "path: trunkline._types.Path | typing.Sequence[trunkline._types.Path] | None = None) -> None"))
      .def("explain", &explain, "path"_a.none(),
           nb::sig("def explain(self, path: trunkline._types.Path) -> trunkline._types.Explanation"),
           "Which I/O path is used for `path`, and why, as a dict.\n\n"
           "`path` is a file, or a directory in which a probe file may be created and removed. \"alignment\" "
           "is\n"
           "what a copy-free direct transfer requires of address (\"memory\") and of offset and length\n"
           "(\"offset\"), in bytes; \"tuning\" is what `trunkline tune` measured, whether it is in effect, "
           "and\n"
           "why; \"gpu\" is the I/O path for the memory of GPUs (\"path\"), with \"why\";\n"
           "\"refused\" lists what was tried and rejected, each with \"what\" and \"why\".")
      .def("stats", &stats, nb::sig("def stats(self) -> trunkline._types.Stats"),
           "Counters since the engine was made, as a dict: payload bytes by I/O path, operations,\n"
           "transfers, retries, errors, pinned memory (bytes) and latencies of transfers (nanoseconds).")
      .def("close", &close, "Finishes submitted operations; further ones raise Error (EBADF). Idempotent.")
      .def_prop_ro(
          "backend",
          [](const EngineObject& self) { return std::string(to_string(self.engine.config().backend)); },
          "The backend in use: \"io_uring\", \"libaio\", \"threads\" or \"memory\" (str).")
      .def_prop_ro("lanes", config_member(&EngineConfig::lanes), "I/O threads (int).")
      .def_prop_ro("queue_depth", config_member(&EngineConfig::queue_depth),
                   "Transfers in flight per lane (int).")
      .def_prop_ro("block_bytes", config_member(&EngineConfig::block_bytes),
                   "Largest transfer, in bytes (int).")
      .def_prop_ro(
          "gpu", [](const EngineObject& self) { return std::string(to_string(self.engine.config().gpu)); },
          "The requested I/O path for the memory of GPUs: \"auto\", \"gds\" or \"bounce\" (str).")
      .def_prop_ro("pinned_budget_bytes", config_member(&EngineConfig::pinned_budget_bytes),
                   "Hard limit for page-locked memory, in bytes (int).")
      .def_prop_ro("features", config_member(&EngineConfig::features),
                   "The features that the backend uses, such as \"registered_buffers\" (list of str).")
      .def(
          "__enter__", [](nb::handle_t<EngineObject> self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> typing_extensions.Self"))
      .def(
          "__exit__", [](const EngineObject& self, const nb::args&) { close(self); },
          nb::sig("def __exit__(self, *exc: object) -> None"))
      .def("__repr__", &repr);

  module.def(
      "default_engine", &default_engine,
      "The default engine of the process, made at first use with default options (the environment\n"
      "variable TRUNKLINE_BACKEND sets its backend). After a fork the child gets a new one. Thread-safe.");
}

}  // namespace trunkline::python
