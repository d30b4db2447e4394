#include <fmt/format.h>
#include <nanobind/ndarray.h>

#include <limits>
#include <memory>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "buffer_view.h"
#include "engine_object.h"
#include "errors.h"
#include "file_object.h"
#include "future_object.h"
#include "interruptible.h"
#include "io/file/file_core.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

using Integers = std::vector<std::uint64_t>;
using Array = nb::ndarray<nb::ro, nb::device::cpu>;

template <class T>
Integers integers_of(const Array& array, const char* name) {
  Integers integers(array.shape(0));
  const auto* const data = static_cast<const T*>(array.data());
  for (std::size_t index = 0; index < integers.size(); ++index) {
    const T value = data[static_cast<std::int64_t>(index) * array.stride(0)];
    if (value < 0)
      raise_value_error(fmt::format("{}: item {} is {}; it must be at least 0", name, index, value));
    integers[index] = static_cast<std::uint64_t>(value);
  }
  return integers;
}

Integers integers_of(const Array& array, nb::handle value, const char* name) {
  if (array.ndim() != 1)
    raise_value_error(fmt::format("{}: must have one dimension, not {}", name, array.ndim()));
  if (array.dtype() == nb::dtype<std::int64_t>()) return integers_of<std::int64_t>(array, name);
  if (array.dtype() == nb::dtype<std::uint64_t>()) return integers_of<std::uint64_t>(array, name);
  if (array.dtype() == nb::dtype<std::int32_t>()) return integers_of<std::int32_t>(array, name);
  if (array.dtype() == nb::dtype<std::uint32_t>()) return integers_of<std::uint32_t>(array, name);
  raise_type_error(fmt::format(
      "{}: must hold integers of 32 or 64 bits, and the items of this {} are of another type; convert it "
      "first, for example to int64",
      name, shown_type(value)));
}

// An array of integers, or a sequence of them.
Integers integers_argument(nb::handle value, const char* name) {
  if (PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr()))  // which are sequences, too
    raise_type_error(
        fmt::format("{}: must be an array or a sequence of integers, not {}", name, shown_type(value)));
  Array array;
  if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr()) && nb::try_cast(value, array, false))
    return integers_of(array, value, name);
  const nb::object items = nb::steal(PySequence_Fast(value.ptr(), ""));
  if (!items.is_valid()) {
    PyErr_Clear();
    raise_type_error(
        fmt::format("{}: must be an array or a sequence of integers, not {}", name, shown_type(value)));
  }
  Integers integers;
  integers.reserve(nb::len(items));
  for (const nb::handle item : nb::borrow<nb::sequence>(items))
    integers.push_back(count_argument(item, name));
  return integers;
}

void check_count(const Integers& integers, const char* name, std::size_t count) {
  if (integers.size() == count) return;
  raise_value_error(
      fmt::format("{}: has {} items, but offsets has {}: one for each range", name, integers.size(), count));
}

// Positions that leave no gaps, in the order of the ranges, where none are given.
std::vector<FileRange> ranges_argument(nb::handle offsets_value, nb::handle lengths_value,
                                       nb::handle positions_value) {
  const Integers offsets = integers_argument(offsets_value, "offsets");
  const Integers lengths = PyIndex_Check(lengths_value.ptr()) && !nb::hasattr(lengths_value, "__len__")
                               ? Integers(offsets.size(), count_argument(lengths_value, "lengths"))
                               : integers_argument(lengths_value, "lengths");
  check_count(lengths, "lengths", offsets.size());
  Integers positions;
  if (positions_value.is_none()) {
    positions.reserve(offsets.size());
    std::uint64_t next = 0;
    for (const std::uint64_t length : lengths) {
      positions.push_back(next);
      // Too many bytes fit into no buffer, which is reported when the ranges are validated.
      next = length > std::numeric_limits<std::uint64_t>::max() - next
                 ? std::numeric_limits<std::uint64_t>::max()
                 : next + length;
    }
  } else {
    positions = integers_argument(positions_value, "positions");
    check_count(positions, "positions", offsets.size());
  }
  std::vector<FileRange> ranges;
  ranges.reserve(offsets.size());
  for (std::size_t index = 0; index < offsets.size(); ++index)
    ranges.push_back({.offset = offsets[index], .length = lengths[index], .position = positions[index]});
  return ranges;
}

std::unique_ptr<FutureObject> submit(const Engine& engine, FileRanges ranges, nb::handle buffer,
                                     nb::handle stream) {
  auto view =
      std::make_unique<BufferView>(buffer, Access::writable, "buffer", Reach::devices, nb::borrow(stream));
  auto object = std::make_unique<FutureObject>(std::move(view));
  Request request{.memory = object->memory()};
  request.ranges = std::make_shared<const FileRanges>(std::move(ranges));
  submit_interruptibly(engine, {&request, 1}, {&object, 1});
  return object;
}

std::unique_ptr<FutureObject> submit(const FileObject& self, nb::handle buffer, nb::handle offsets,
                                     nb::handle lengths, nb::handle positions, nb::handle stream) {
  return submit(unwrap(self.file().core()->engine()),
                {.files = {self.file()}, .ranges = ranges_argument(offsets, lengths, positions)}, buffer,
                stream);
}

std::unique_ptr<FutureObject> submit(const EngineObject& self, nb::handle files_value, nb::handle file_index,
                                     nb::handle buffer, nb::handle offsets, nb::handle lengths,
                                     nb::handle positions, nb::handle stream) {
  FileRanges all;
  const nb::object files = nb::steal(PySequence_Fast(files_value.ptr(), "files: must be a sequence of File"));
  if (!files.is_valid()) throw nb::python_error();
  for (const nb::handle file : nb::borrow<nb::sequence>(files)) {
    if (!nb::isinstance<FileObject>(file))
      raise_type_error(
          fmt::format("files: item {} must be trunkline.File, not {}", all.files.size(), shown_type(file)));
    all.files.push_back(nb::cast<FileObject&>(file).file());
  }
  all.ranges = ranges_argument(offsets, lengths, positions);
  const Integers indices = integers_argument(file_index, "file_index");
  check_count(indices, "file_index", all.ranges.size());
  for (std::size_t index = 0; index < indices.size(); ++index) {
    if (indices[index] >= all.files.size())
      raise_value_error(fmt::format("file_index: item {} is {}, but there are {} files", index,
                                    indices[index], all.files.size()));
    all.ranges[index].file = static_cast<std::uint32_t>(indices[index]);
  }
  return submit(self.engine, std::move(all), buffer, stream);
}

#define RANGES_SIGNATURE                                                           \
  "offsets: trunkline._types.Integers, lengths: int | trunkline._types.Integers, " \
  "positions: trunkline._types.Integers | None = None, *, stream: object = None"
#define RANGES_DOC                                                                                           \
  "offsets: bytes from the file's start, and lengths: bytes, of each range (an int: of all); arrays of\n"    \
  "int64 (numpy, torch) or sequences of int. positions: where each range goes in `buffer`, bytes from its\n" \
  "start; None: one after another, in the order of the ranges. Ranges may overlap in the file; where\n"      \
  "positions overlap, the buffer holds the bytes of either range. Bytes of the buffer outside of all\n"      \
  "ranges are left as they are. The ranges are read in the order of their offsets, neighbours together.\n"

void register_on_file(nb::class_<FileObject>& file) {
  file.def(
          "read_ranges",
          [](const FileObject& self, nb::handle buffer, nb::handle offsets, nb::handle lengths,
             nb::handle positions, nb::handle stream) {
            return unwrap(result_or_cancel(submit(self, buffer, offsets, lengths, positions, stream)));
          },
          "buffer"_a.none(), "offsets"_a.none(), "lengths"_a.none(), "positions"_a = nb::none(),
          nb::kw_only(), "stream"_a = nb::none(),
          nb::sig("def read_ranges(self, buffer: trunkline._types.WritableBuffer, " RANGES_SIGNATURE
                  ") -> int"),
          "Reads many ranges into `buffer` at once, and returns the sum of their lengths in "
          "bytes.\n\n" RANGES_DOC
          "Raises ValueError for ranges that do not fit into the buffer, EndOfFile if the file ends before "
          "a\n"
          "range does, another trunkline.Error if reading fails; these name the range by its index. What "
          "the\n"
          "buffer holds after an error is unspecified. Thread-safe. Ctrl-C cancels it.")
      .def(
          "async_read_ranges",
          [](const FileObject& self, nb::handle buffer, nb::handle offsets, nb::handle lengths,
             nb::handle positions, nb::handle stream) {
            return submit(self, buffer, offsets, lengths, positions, stream).release();
          },
          "buffer"_a.none(), "offsets"_a.none(), "lengths"_a.none(), "positions"_a = nb::none(),
          nb::kw_only(), "stream"_a = nb::none(),
          nb::sig("def async_read_ranges(self, buffer: trunkline._types.WritableBuffer, " RANGES_SIGNATURE
                  ") -> Future"),
          "Submits a read_ranges and returns one Future for all ranges, which keeps `buffer` "
          "alive.\n\n" RANGES_DOC
          "Raises for an invalid argument; the Future raises ValueError for ranges that do not fit, and "
          "errors\n"
          "of reading.");
}

}  // namespace

void register_ranges(nb::module_& module) {
  auto file = nb::borrow<nb::class_<FileObject>>(module.attr("File"));
  register_on_file(file);
  auto engine = nb::borrow<nb::class_<EngineObject>>(module.attr("Engine"));
  engine
      .def(
          "read_ranges",
          [](const EngineObject& self, nb::handle files, nb::handle file_index, nb::handle buffer,
             nb::handle offsets, nb::handle lengths, nb::handle positions, nb::handle stream) {
            return unwrap(result_or_cancel(
                submit(self, files, file_index, buffer, offsets, lengths, positions, stream)));
          },
          "files"_a.none(), "file_index"_a.none(), "buffer"_a.none(), "offsets"_a.none(), "lengths"_a.none(),
          "positions"_a = nb::none(), nb::kw_only(), "stream"_a = nb::none(),
          nb::sig("def read_ranges(self, files: collections.abc.Sequence[File], file_index: "
                  "trunkline._types.Integers, buffer: trunkline._types.WritableBuffer, " RANGES_SIGNATURE
                  ") -> int"),
          "As File.read_ranges, for ranges of many files: range i is of files[file_index[i]].")
      .def(
          "async_read_ranges",
          [](const EngineObject& self, nb::handle files, nb::handle file_index, nb::handle buffer,
             nb::handle offsets, nb::handle lengths, nb::handle positions, nb::handle stream) {
            return submit(self, files, file_index, buffer, offsets, lengths, positions, stream).release();
          },
          "files"_a.none(), "file_index"_a.none(), "buffer"_a.none(), "offsets"_a.none(), "lengths"_a.none(),
          "positions"_a = nb::none(), nb::kw_only(), "stream"_a = nb::none(),
          nb::sig("def async_read_ranges(self, files: collections.abc.Sequence[File], file_index: "
                  "trunkline._types.Integers, buffer: trunkline._types.WritableBuffer, " RANGES_SIGNATURE
                  ") -> Future"),
          "As File.async_read_ranges, for ranges of many files: range i is of files[file_index[i]].");
}

}  // namespace trunkline::python
