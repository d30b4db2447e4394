#include <fmt/format.h>

#include <array>

#include "arguments.h"
#include "bindings.h"
#include "engine_object.h"
#include "errors.h"
#include "file_object.h"
#include "future_object.h"
#include "interruptible.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

nb::object file_argument(nb::handle value) {
  if (!nb::isinstance<FileObject>(value))
    raise_type_error("file: must be trunkline.File, not " + shown_type(value));
  return nb::borrow(value);
}

struct RequestObject {
  RequestObject(nb::handle file_in, nb::handle buffer_in, nb::handle offset_in, nb::handle stream_in)
      : file(file_argument(file_in)),
        buffer(nb::borrow(buffer_in)),
        offset(count_argument(offset_in, "offset")),
        stream(nb::borrow(stream_in)) {}

  nb::object file;  // a FileObject
  nb::object buffer;
  std::uint64_t offset;
  nb::object stream;
};

struct ReadObject : RequestObject {
  using RequestObject::RequestObject;
};
struct WriteObject : RequestObject {
  using RequestObject::RequestObject;
};

template <class T>
void register_request(nb::module_& module, const char* name, const char* signature,
                      const char* buffer_signature, const char* doc) {
  nb::class_<T>(module, name, doc)
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle>(), "file"_a.none(), "buffer"_a.none(),
           "offset"_a.none() = 0, nb::kw_only(), "stream"_a = nb::none(), nb::sig(signature))
      .def_prop_ro(
          "stream", [](const T& self) { return self.stream; },
          nb::for_getter(nb::sig("def stream(self) -> object")), "The stream that comes first, as given.")
      .def_prop_ro(
          "file", [](const T& self) { return self.file; }, nb::for_getter(nb::sig("def file(self) -> File")),
          "The open file.")
      .def_prop_ro(
          "buffer", [](const T& self) { return self.buffer; }, nb::for_getter(nb::sig(buffer_signature)),
          "The buffer as it was given.")
      .def_prop_ro("offset", [](const T& self) { return self.offset; }, "Bytes from the file's start (int).");
}

nb::list submit(const EngineObject& self, nb::handle requests_value) {
  const nb::object items =
      nb::steal(PySequence_Fast(requests_value.ptr(), "requests: must be a sequence of Read and Write"));
  if (!items.is_valid()) throw nb::python_error();
  const std::size_t count = nb::len(items);
  std::vector<Request> requests;
  requests.reserve(count);
  std::vector<std::unique_ptr<FutureObject>> objects;
  objects.reserve(count);
  for (const nb::handle item : nb::borrow<nb::sequence>(items)) {
    const bool is_read = nb::isinstance<ReadObject>(item);
    if (!is_read && !nb::isinstance<WriteObject>(item)) {
      raise_type_error(
          fmt::format("requests: item {} must be Read or Write, not {}", requests.size(), shown_type(item)));
    }
    const auto& object = is_read ? static_cast<const RequestObject&>(nb::cast<ReadObject&>(item))
                                 : static_cast<const RequestObject&>(nb::cast<WriteObject&>(item));
    std::array<char, 48> name{};  // of a number at most: it fits
    fmt::format_to_n(name.data(), name.size() - 1, "requests[{}].buffer", requests.size());
    auto view = std::make_unique<BufferView>(object.buffer, is_read ? Access::writable : Access::read_only,
                                             name.data(), Reach::devices, object.stream);
    objects.push_back(std::make_unique<FutureObject>(std::move(view)));
    Request& request = requests.emplace_back();
    request.op = is_read ? Op::read : Op::write;
    request.file = &nb::cast<FileObject&>(object.file).file();
    request.memory = objects.back()->memory();
    request.offset = object.offset;
  }
  submit_interruptibly(self.engine, requests, objects);
  nb::list result;
  for (std::unique_ptr<FutureObject>& object : objects) {
    result.append(nb::cast(object.release(), nb::rv_policy::take_ownership));
  }
  return result;
}

}  // namespace

void register_batch(nb::module_& module) {
  register_request<ReadObject>(
      module, "Read",
      "def __init__(self, file: File, buffer: trunkline._types.WritableBuffer, offset: int = 0, *, stream: "
      "object = None) -> None",
      "def buffer(self) -> trunkline._types.WritableBuffer",
      "One read of a batch for Engine.submit: fill `buffer` from `offset` (bytes) of `file`.");
  register_request<WriteObject>(
      module, "Write",
      "def __init__(self, file: File, buffer: trunkline._types.ReadableBuffer, offset: int = 0, *, stream: "
      "object = None) -> None",
      "def buffer(self) -> trunkline._types.ReadableBuffer",
      "One write of a batch for Engine.submit: write `buffer` at `offset` (bytes) of `file`.");
  nb::object engine = module.attr("Engine");
  nb::class_<EngineObject> engine_class = nb::borrow<nb::class_<EngineObject>>(engine);
  engine_class.def(
      "submit", &submit, "requests"_a.none(),
      nb::sig("def submit(self, requests: collections.abc.Sequence[Read | Write]) -> builtins.list[Future]"),
      "Submits a batch, in order and with one wake-up of the lanes, and returns one Future each.\n\n"
      "Waits only while the queue is full. Ctrl-C ends that wait: requests are submitted in order, so some\n"
      "at the beginning of the batch run to their end, with their memory kept alive, and the others are not\n"
      "started. Raises for an invalid argument, before anything is submitted; the Futures raise other "
      "errors.");
}

}  // namespace trunkline::python
