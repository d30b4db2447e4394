#include <fmt/format.h>
#include <nanobind/stl/pair.h>

#include <memory>

#include "arguments.h"
#include "bindings.h"
#include "buffer_view.h"
#include "cuda_objects.h"
#include "engine_object.h"
#include "errors.h"
#include "file_object.h"
#include "interruptible.h"
#include "os/environment.h"
#include "os/fork_generation.h"
#include "stats_dict.h"
#include "stream_arguments.h"
#include "trunkline/stream.h"

namespace trunkline::python {

using namespace nb::literals;

StreamUnit unit_argument(const UnitArgument& unit) {
  const auto& [name, bytes, parts] = unit;
  StreamUnit made{.name = name, .bytes = bytes, .parts = {}};
  for (const auto& [file, offset, part_bytes, at, checksum] : parts) {
    made.parts.push_back(
        {.file = file, .offset = offset, .bytes = part_bytes, .at = at, .checksum = checksum});
  }
  return made;
}

StreamVerify verify_argument(nb::handle value) {
  if (value.equal(nb::str("never"))) return StreamVerify::never;
  if (value.equal(nb::str("once"))) return StreamVerify::once;
  if (value.equal(nb::str("always"))) return StreamVerify::always;
  raise_value_error("verify: must be \"never\", \"once\" or \"always\"");
}

std::vector<File> files_argument(const std::vector<nb::object>& files) {
  std::vector<File> made;
  for (const nb::object& file : files) {
    if (!nb::isinstance<FileObject>(file))
      raise_type_error("files: must hold only File, not " + shown_type(file));
    made.push_back(nb::cast<FileObject&>(file).file());
  }
  return made;
}

namespace {

std::vector<StreamUnit> units_argument(const std::vector<UnitArgument>& units) {
  std::vector<StreamUnit> made;
  for (const UnitArgument& unit : units) made.push_back(unit_argument(unit));
  return made;
}

class StreamObject {
 public:
  StreamObject(const std::vector<nb::object>& files_value, const std::vector<UnitArgument>& units,
               nb::handle memory_bytes, std::size_t slots, nb::handle verify, nb::handle engine,
               nb::handle device_memory)
      : generation_(os::fork_generation()) {
    StreamOptions options{.slots = slots, .verify = verify_argument(verify)};
    if (const auto bytes = optional_size_argument(memory_bytes, "memory_bytes"))
      options.memory_bytes = *bytes;
    if (!device_memory.is_none()) {
      device_memory_ =
          std::make_unique<BufferView>(device_memory, Access::writable, "device_memory", Reach::devices);
      device_memory_->keep_storage();
      options.device_memory = device_memory_->memory();
      if (options.device_memory.device == nullptr)
        raise_value_error("device_memory: must be in the memory of a GPU");
    }
    std::vector<File> files = files_argument(files_value);
    std::vector<StreamUnit> wanted = units_argument(units);
    const Engine used = engine_or_default(engine);
    auto opened = [&] {
      const GilReleased unlocked;
      return WeightStream::open(used, std::move(files), std::move(wanted), options);
    }();
    stream_ = std::make_unique<WeightStream>(unwrap(std::move(opened)));
  }
  StreamObject(const StreamObject&) = delete;
  StreamObject& operator=(const StreamObject&) = delete;
  ~StreamObject() {
    if (generation_ != os::fork_generation()) {
      static_cast<void>(stream_.release());  // its transfers are the parent's
      static_cast<void>(device_memory_.release());
      return;
    }
    const GilReleased unlocked;  // waits for reads in flight
    stream_.reset();
  }

  WeightStream& stream() { return *stream_; }

  // Which memory the unit is in, and where.
  std::pair<std::size_t, std::uint64_t> acquire(std::size_t unit) {
    const MemoryView view = unwrap(on_main_thread() ? acquire_interruptibly(unit) : acquire_here(unit));
    const auto memory = stream_->memory();
    for (std::size_t index = 0; index < memory.size(); ++index) {
      if (view.data >= memory[index].data && view.data < memory[index].data + memory[index].bytes)
        return {index, static_cast<std::uint64_t>(view.data - memory[index].data)};
    }
    raise(make_error(ErrorKind::invalid_argument, "unit: is in no memory of the stream"));
  }

  bool is_on_device() const { return device_memory_ != nullptr; }

  void release(std::size_t unit, nb::handle stream) {
    void* const handle = stream.is_none() ? nullptr : stream_argument(stream, "stream");
    // Reading ahead may have to wait for room in the engine's queue.
    Status status = [&] {
      const GilReleased unlocked;
      return stream_->release(unit, handle);
    }();
    unwrap(std::move(status));
  }

  void set_order(std::vector<std::size_t> order) {
    Status status = [&] {
      const GilReleased unlocked;
      return stream_->set_order(std::move(order));
    }();
    unwrap(std::move(status));
  }

 private:
  Result<MemoryView> acquire_here(std::size_t unit) {
    const GilReleased unlocked;
    return stream_->acquire(unit);
  }
  Result<MemoryView> acquire_interruptibly(std::size_t unit) {
    while (true) {
      Result<MemoryView> view = [&] {
        const GilReleased unlocked;
        return stream_->acquire(unit, kSignalLatency);
      }();
      if (view || view.error().kind != ErrorKind::timed_out) return view;
      check_signals();
    }
  }

  const unsigned generation_;
  std::unique_ptr<BufferView> device_memory_;
  std::unique_ptr<WeightStream> stream_;
};

int export_memory(PyObject* self, Py_buffer* view, int flags) {
  const MemoryView& memory = nb::inst_ptr<StreamMemoryObject>(self)->memory;
  return PyBuffer_FillInfo(view, self, memory.data, static_cast<Py_ssize_t>(memory.bytes), 0, flags);
}

int traverse_memory(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<StreamMemoryObject>(self)->owner.ptr());
  return 0;
}

PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&export_memory)},
                              {Py_tp_traverse, reinterpret_cast<void*>(&traverse_memory)},
                              {0, nullptr}};

std::vector<StreamMemoryObject*> memory_of(nb::handle_t<StreamObject> self) {
  std::vector<StreamMemoryObject*> made;
  if (nb::cast<StreamObject&>(self).is_on_device()) return made;  // the caller's own
  for (const MemoryView& memory : nb::cast<StreamObject&>(self).stream().memory())
    made.push_back(new StreamMemoryObject{nb::borrow(self), memory});
  return made;
}

constexpr StatsField<StreamStats> kStreamStats[] = {
    {"units_read", &StreamStats::units_read},
    {"bytes_read", &StreamStats::bytes_read},
    {"acquired", &StreamStats::acquired},
    {"waited", &StreamStats::waited},
    {"wait_seconds", &StreamStats::wait_ns, true},
    {"verify_seconds", &StreamStats::verify_ns, true},
    {"read_seconds", &StreamStats::read_ns, true},
    {"unused", &StreamStats::unused},
    {"failed", &StreamStats::failed},
    {"bytes_copied", &StreamStats::bytes_copied},
};

nb::dict stats_of(StreamObject& self) { return stats_dict(self.stream().stats(), kStreamStats); }

nb::dict dict_of(const StreamPlacement& placement) {
  nb::dict dict;
  dict["resident"] = nb::cast(placement.resident);
  dict["slots"] = placement.slots;
  dict["slot_bytes"] = placement.slot_bytes;
  dict["memory_bytes"] = placement.memory_bytes;
  return dict;
}

nb::dict place(const std::vector<std::uint64_t>& unit_bytes, nb::handle memory_bytes, std::size_t slots) {
  return dict_of(unwrap(place_units(unit_bytes, size_argument(memory_bytes, "memory_bytes"), slots)));
}

}  // namespace

void register_stream(nb::module_& module) {
  nb::class_<StreamMemoryObject>(module, "StreamMemory", nb::type_slots(memory_slots),
                                 "Memory of a WeightStream, with the buffer protocol.")
      .def("__len__", [](const StreamMemoryObject& self) { return self.memory.bytes; });
  nb::class_<StreamObject>(
      module, "WeightStream", nb::is_weak_referenceable(),
      "Weights larger than memory: units of files, read in a cycle ahead of their use. Thread-safe.\n\n"
      "files: open for reading. units: (name, bytes of memory, parts) each, a part being (index of the file, "
      "offset in it,\n"
      "bytes, offset in the unit's memory, CRC-32C or None). memory_bytes: bound on slots and units that "
      "stay "
      "(int or str;\n"
      "None: all stay). verify: verify the checksums \"never\", \"once\" (and whenever the files were "
      "modified) or\n"
      "\"always\". device_memory: memory of a GPU, divided into as many slots as fit, to which units are "
      "copied\n"
      "ahead of their use. Raises OutOfBudget, naming the least, if the slots do not fit.")
      .def(nb::init<const std::vector<nb::object>&, const std::vector<UnitArgument>&, nb::handle, std::size_t,
                    nb::handle, nb::handle, nb::handle>(),
           "files"_a, "units"_a, nb::kw_only(), "memory_bytes"_a = nb::none(), "slots"_a = 2,
           "verify"_a = "once", "engine"_a = nb::none(), "device_memory"_a = nb::none(),
           nb::sig("def __init__(self, files: collections.abc.Sequence[File], units: "
                   "collections.abc.Sequence[tuple[str, int, collections.abc.Sequence[tuple[int, int, int, "
                   "int, int | None]]]], *, memory_bytes: int | str | None = None, slots: int = 2, verify: "
                   "typing.Literal['never', 'once', 'always'] = 'once', engine: Engine | None = None, "
                   "device_memory: trunkline._types.WritableBuffer | None = None) -> None"))
      .def("acquire", &StreamObject::acquire, "unit"_a,
           "Waits until the unit is in memory: (index of its memory, offset in it). Ctrl-C ends the wait.\n\n"
           "Raises the error of reading it; acquiring again reads again.")
      .def("release", &StreamObject::release, "unit"_a, "stream"_a = nb::none(),
           nb::sig("def release(self, unit: int, stream: object | None = None) -> None"),
           "Allows the unit's memory to be reused; on a GPU after the present work of `stream` (None: the "
           "default one).")
      .def("set_order", &StreamObject::set_order, "order"_a,
           "Sets the order in which units are acquired from now on: each index once.")
      .def_prop_ro("memory", &memory_of, nb::rv_policy::take_ownership,
                   nb::for_getter(nb::sig("def memory(self) -> typing.List[StreamMemory]")),
                   "The memory of the slots, and of the units that stay; none with device_memory.")
      .def_prop_ro(
          "placement", [](StreamObject& self) { return dict_of(self.stream().placement()); },
          nb::for_getter(nb::sig("def placement(self) -> dict[str, typing.Any]")),
          "Which units stay: \"resident\" (list of bool), \"slots\", \"slot_bytes\", \"memory_bytes\".")
      .def("stats", &stats_of, nb::sig("def stats(self) -> dict[str, float]"),
           "Counts, bytes and seconds since the stream was opened.");
  module.def(
      "parse_size",
      [](nb::handle value, const std::string& name) { return size_argument(value, name.c_str()); },
      "value"_a.none(), "name"_a, nb::sig("def parse_size(value: int | str, name: str) -> int"),
      "Bytes of an int or a str such as \"400MB\"; `name`: of the argument, for errors. Private.");
  module.def(
      "free_memory_bytes", &os::free_memory_bytes,
      "How much memory this process may still use: of the machine, and of its control groups. Private.");
  module.def(
      "device_layout", [](const UnitArgument& unit) { return device_layout(units_argument({unit}).front()); },
      "unit"_a,
      nb::sig(
          "def device_layout(unit: tuple[str, int, collections.abc.Sequence[tuple[int, int, int, int, int "
          "| None]]]) -> list[int]"),
      "Where the parts of a unit of WeightStream begin in the memory of a GPU, in bytes from the unit's "
      "start.");
  module.def(
      "device_slot_bytes",
      [](const std::vector<UnitArgument>& units) { return device_slot_bytes(units_argument(units)); },
      "units"_a,
      nb::sig("def device_slot_bytes(units: collections.abc.Sequence[tuple[str, int, "
              "collections.abc.Sequence[tuple[int, int, int, int, int | None]]]]) -> int"),
      "The size of the slots for these units of WeightStream in the memory of a GPU.");
  module.def("place_units", &place, "unit_bytes"_a, "memory_bytes"_a.none(), "slots"_a = 2,
             nb::sig("def place_units(unit_bytes: collections.abc.Sequence[int], memory_bytes: int | str, "
                     "slots: int = 2) -> dict[str, typing.Any]"),
             "What WeightStream.placement would be. Raises OutOfBudget, naming the least budget.");
}

}  // namespace trunkline::python
