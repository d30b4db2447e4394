#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "buffer_view.h"
#include "errors.h"
#include "format/safetensors.h"
#include "gil.h"

// The file format is in src/format; trunkline/_formats/safetensors knows tensors and files. All of
// these are private to the package.

namespace trunkline::python {

using namespace nb::literals;

namespace {

std::string_view text_of(const nb::str& value) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &length);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<std::size_t>(length)};
}

nb::str str_of(std::string_view text) { return nb::str(text.data(), text.size()); }

std::string_view characters_of(const MemoryView& memory) {
  return {reinterpret_cast<const char*>(memory.data), static_cast<std::size_t>(memory.bytes)};
}

std::string message_path(nb::handle path) {
  return path.is_none() ? std::string() : path_argument(path, "path");
}

std::uint64_t parse_length(nb::handle head_value, nb::handle file_bytes, nb::handle path) {
  const BufferView head(head_value, Access::read_only, "head");
  if (head.memory().bytes != format::kLengthBytes) raise_value_error("head: must be 8 bytes");
  const std::span<const std::byte, format::kLengthBytes> bytes(head.memory().data, format::kLengthBytes);
  return unwrap(
      format::parse_safetensors_length(bytes, count_argument(file_bytes, "file_bytes"), message_path(path)));
}

nb::tuple parse(nb::handle json_value, nb::handle file_bytes_value, nb::handle path_value) {
  const BufferView json(json_value, Access::read_only, "json");
  const std::uint64_t file_bytes = count_argument(file_bytes_value, "file_bytes");
  const std::string path = message_path(path_value);
  Result<format::SafetensorsHeader> parsed = [&] {
    const GilReleased unlocked;
    return format::parse_safetensors(characters_of(json.memory()), file_bytes, path);
  }();
  const format::SafetensorsHeader header = unwrap(std::move(parsed));
  nb::dict metadata;
  for (const auto& [key, value] : header.metadata) metadata[str_of(key)] = str_of(value);
  nb::list tensors;
  for (const format::StoredTensor& tensor : header.tensors) {
    nb::list shape;
    for (const std::uint64_t extent : tensor.shape) shape.append(extent);
    tensors.append(nb::make_tuple(str_of(tensor.name), str_of(format::name_of(tensor.dtype)),
                                  nb::tuple(shape), tensor.begin, tensor.end));
  }
  return nb::make_tuple(metadata, tensors);
}

format::TensorToStore tensor_argument(nb::handle item) {
  const auto fields = nb::cast<nb::tuple>(item);
  if (fields.size() != 3) raise_type_error("tensors: must hold tuples of name, dtype and shape");
  format::TensorToStore tensor{.name = std::string(text_of(nb::cast<nb::str>(fields[0]))), .shape = {}};
  const std::string_view dtype_name = text_of(nb::cast<nb::str>(fields[1]));
  const auto dtype = format::dtype_named(dtype_name);
  if (!dtype) raise_value_error("tensors: no dtype of the format: " + std::string(dtype_name));
  tensor.dtype = *dtype;
  for (const nb::handle extent : nb::cast<nb::tuple>(fields[2]))
    tensor.shape.push_back(count_argument(extent, "shape"));
  return tensor;
}

nb::tuple lay_out(const nb::list& tensor_values, const nb::dict& metadata_values, nb::handle alignment,
                  bool keep_order) {
  std::vector<format::TensorToStore> tensors;
  for (const nb::handle item : tensor_values) tensors.push_back(tensor_argument(item));
  format::Metadata metadata;
  for (const auto& [key, value] : metadata_values) {
    metadata.emplace(std::string(text_of(nb::cast<nb::str>(key))),
                     std::string(text_of(nb::cast<nb::str>(value))));
  }
  const std::uint64_t multiple = count_argument(alignment, "alignment");
  Result<format::SafetensorsLayout> laid_out = [&] {
    const GilReleased unlocked;
    return format::lay_out_safetensors(
        tensors, metadata, multiple,
        keep_order ? format::StorageOrder::given : format::StorageOrder::aligned_first);
  }();
  const format::SafetensorsLayout layout = unwrap(std::move(laid_out));
  nb::list places;
  for (const format::StoredTensor& tensor : layout.tensors)
    places.append(nb::make_tuple(tensor.begin, tensor.end));
  return nb::make_tuple(nb::bytes(layout.head.data(), layout.head.size()), places, layout.file_bytes);
}

}  // namespace

void register_safetensors(nb::module_& module) {
  module.def(
      "parse_safetensors_length", &parse_length, "head"_a, "file_bytes"_a, "path"_a = nb::none(),
      nb::sig("def parse_safetensors_length(head: trunkline._types.ReadableBuffer, file_bytes: int, path: "
              "trunkline._types.Path | None = None) -> int"),
      "The size of the JSON header, parsed from the file's first 8 bytes. Raises Format. Private.");
  module.def("parse_safetensors", &parse, "json"_a, "file_bytes"_a, "path"_a = nb::none(),
             nb::sig("def parse_safetensors(json: trunkline._types.ReadableBuffer, file_bytes: int, path: "
                     "trunkline._types.Path | None = None) -> tuple[dict[str, str], list[tuple[str, str, "
                     "tuple[int, ...], int, int]]]"),
             "The metadata, and name, dtype, shape, begin and end (bytes in the file) of each tensor, in the "
             "order of their\nbytes. Raises Format. Private.");
  module.def(
      "lay_out_safetensors", &lay_out, "tensors"_a, "metadata"_a, "alignment"_a, "keep_order"_a = false,
      nb::sig("def lay_out_safetensors(tensors: list[tuple[str, str, tuple[int, ...]]], metadata: "
              "dict[str, str], alignment: int, keep_order: bool = False) -> tuple[bytes, list[tuple[int, "
              "int]], int]"),
      "The file's head, where each tensor (name, dtype, shape) begins and ends, and the file's size, in "
      "bytes. Raises\nValueError for values that the format does not support. Private.");
}

}  // namespace trunkline::python
