// The Python class CheckpointManifest: a manifest that stays in C++, since one of a million tensors takes
// seconds and gigabytes as Python objects.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "buffer_view.h"
#include "checkpoint/tensor_places.h"
#include "errors.h"
#include "file_layout_object.h"
#include "manifest_object.h"

namespace trunkline::python {

using namespace nb::literals;
using checkpoint::Manifest;
using checkpoint::Piece;
using checkpoint::Shard;
using checkpoint::Tensor;

namespace {

nb::str str_of(std::string_view text) { return nb::str(text.data(), text.size()); }

std::uint64_t bytes_of(const Tensor& tensor) {
  std::uint64_t bytes = 0;
  for (const Piece& piece : tensor.pieces) bytes += piece.bytes;
  return bytes;
}

// There are few dtypes: each is one string, which all tensors share.
nb::list tensors(const ManifestObject& self) {
  nb::dict dtypes;
  nb::list list;
  for (const Tensor& tensor : self.manifest->tensors) {
    nb::object dtype = str_of(tensor.dtype);
    dtype = dtypes.attr("setdefault")(dtype, dtype);
    const nb::object shape = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(tensor.shape.size())));
    if (!shape.is_valid()) throw nb::python_error();
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      PyObject* const extent = nb::int_(tensor.shape[i]).release().ptr();
      if (PyTuple_SetItem(shape.ptr(), static_cast<Py_ssize_t>(i), extent) != 0) throw nb::python_error();
    }
    list.append(nb::make_tuple(str_of(tensor.name), dtype, shape, bytes_of(tensor)));
  }
  return list;
}

std::vector<std::string> tensors_in(const ManifestObject& self, std::uint64_t shard, std::uint64_t begin,
                                    std::uint64_t end) {
  if (shard >= self.manifest->shards.size()) raise_value_error("shard: there is no such one");
  return checkpoint::TensorPlaces(*self.manifest).in(shard, begin, end);
}

// Targets are buffers, or None for tensors that are not read. Of a step that is not read whole, shards
// without any target are None, and others have the checksums of the chunks that targets are in.
nb::list layouts(const ManifestObject& self, const nb::list& targets, bool verify,
                 std::uint64_t fresh_from_bytes) {
  const Manifest& manifest = *self.manifest;
  if (targets.size() != manifest.tensors.size()) raise_value_error("targets: must be one for each tensor");
  std::vector<std::unique_ptr<FileLayoutObject>> made;
  for (std::size_t i = 0; i < manifest.shards.size(); ++i)
    made.push_back(std::make_unique<FileLayoutObject>(self.shard_path(i), manifest.shards[i].bytes));
  bool is_whole = true;
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
    const Tensor& tensor = manifest.tensors[i];
    if (targets[i].is_none()) {
      is_whole = false;
      continue;
    }
    const auto view =
        std::make_shared<BufferView>(targets[i], Access::writable, "targets", Reach::devices, nb::none());
    if (view->memory().bytes != bytes_of(tensor))
      raise_value_error("targets: the tensor \"" + tensor.name + "\" has another size");
    view->keep_storage();
    const bool fresh = view->memory().bytes >= fresh_from_bytes;
    std::uint64_t at = 0;
    for (const Piece& piece : tensor.pieces) {
      made[piece.shard]->add_target_part(piece.offset, view, {at, piece.bytes}, fresh);
      at += piece.bytes;
    }
  }
  nb::list list;
  for (std::size_t i = 0; i < made.size(); ++i) {
    const Shard& shard = manifest.shards[i];
    if (!is_whole && made[i]->layout().extents.empty()) {
      list.append(nb::none());
      continue;
    }
    // One of an earlier commit may have bytes that no tensor needs any more.
    const bool reads_all = is_whole && shard.commit == 0;
    if (verify && reads_all) made[i]->expect_checksums(shard.crc32c, manifest.chunk_bytes);
    if (verify && !reads_all) made[i]->expect_checksums_of_targets(shard.crc32c, manifest.chunk_bytes);
    list.append(nb::cast(made[i].release(), nb::rv_policy::take_ownership));
  }
  return list;
}

nb::list pieces(const ManifestObject& self, std::size_t tensor) {
  if (tensor >= self.manifest->tensors.size()) raise_value_error("tensor: there is no such one");
  nb::list list;
  for (const Piece& piece : self.manifest->tensors[tensor].pieces)
    list.append(nb::make_tuple(piece.shard, piece.offset, piece.bytes));
  return list;
}

// Of each shard: volume, file, bytes, and the commit that wrote it.
nb::list shards(const ManifestObject& self) {
  nb::list list;
  for (const Shard& shard : self.manifest->shards) {
    list.append(nb::make_tuple(decode_path(self.manifest->volumes[shard.volume]), decode_path(shard.file),
                               shard.bytes, shard.commit == 0 ? self.manifest->commit : shard.commit));
  }
  return list;
}

nb::list digests(const ManifestObject& self, std::size_t tensor) {
  if (tensor >= self.manifest->tensors.size()) raise_value_error("tensor: there is no such one");
  nb::list list;
  for (const checkpoint::DigestRun& run : self.manifest->tensors[tensor].digests)
    list.append(
        nb::make_tuple(run.first, nb::bytes(run.digests.data(), run.digests.size() * sizeof(Digest))));
  return list;
}

std::vector<std::uint64_t> shard_bytes(const ManifestObject& self) {
  std::vector<std::uint64_t> bytes;
  for (const Shard& shard : self.manifest->shards) bytes.push_back(shard.bytes);
  return bytes;
}

std::vector<std::uint32_t> shard_checksums(const ManifestObject& self, std::size_t shard) {
  if (shard >= self.manifest->shards.size()) raise_value_error("shard: there is no such one");
  return self.manifest->shards[shard].crc32c;
}

nb::dict metrics(const ManifestObject& self) {
  nb::dict dict;
  for (const auto& [name, value] : self.manifest->metrics) dict[str_of(name)] = value;
  return dict;
}

}  // namespace

void register_manifest(nb::module_& module) {
  nb::class_<ManifestObject>(module, "CheckpointManifest",
                             "A manifest, read by CheckpointStore.open_manifest. Thread-safe.")
      .def_prop_ro(
          "commit", [](const ManifestObject& self) { return self.manifest->commit; },
          nb::for_getter(nb::sig("def commit(self) -> int")), "The number of the commit (int).")
      .def_prop_ro(
          "step", [](const ManifestObject& self) { return self.manifest->step; },
          nb::for_getter(nb::sig("def step(self) -> int")), "The step (int).")
      .def_prop_ro(
          "time", [](const ManifestObject& self) { return str_of(self.manifest->time); },
          nb::for_getter(nb::sig("def time(self) -> str")), "When it was committed, in UTC (str).")
      .def_prop_ro(
          "world_size", [](const ManifestObject& self) { return self.manifest->world_size; },
          nb::for_getter(nb::sig("def world_size(self) -> int")), "How many processes saved it (int).")
      .def_prop_ro("metrics", &metrics, nb::for_getter(nb::sig("def metrics(self) -> dict[str, float]")),
                   "What was measured of it (dict of str to float).")
      .def_prop_ro(
          "chunk_bytes", [](const ManifestObject& self) { return self.manifest->chunk_bytes; },
          nb::for_getter(nb::sig("def chunk_bytes(self) -> int")), "Bytes of a chunk (int).")
      .def_prop_ro(
          "state", [](const ManifestObject& self) { return str_of(self.manifest->state); },
          nb::for_getter(nb::sig("def state(self) -> str")), "What was saved beside the tensors: JSON (str).")
      .def("shard_paths", &ManifestObject::shard_paths, nb::sig("def shard_paths(self) -> list[str]"),
           "Paths of the shards.")
      .def("shard_bytes", &shard_bytes, nb::sig("def shard_bytes(self) -> list[int]"), "Sizes of the shards.")
      .def("shard_checksums", &shard_checksums, "shard"_a,
           nb::sig("def shard_checksums(self, shard: int) -> list[int]"),
           "The CRC-32C of each chunk of a shard.")
      .def("tensors", &tensors, nb::sig("def tensors(self) -> list[tuple[str, str, tuple[int, ...], int]]"),
           "Name, dtype, shape and bytes of each tensor.")
      .def("tensors_in", &tensors_in, "shard"_a, "begin"_a, "end"_a,
           nb::sig("def tensors_in(self, shard: int, begin: int, end: int) -> list[str]"),
           "Names of the tensors with bytes in a range of a shard, in the order of their bytes.")
      .def("pieces", &pieces, "tensor"_a,
           nb::sig("def pieces(self, tensor: int) -> list[tuple[int, int, int]]"),
           "Where the bytes of a tensor are, in their order: shard, offset in its file, and bytes.")
      .def_prop_ro(
          "unit_bytes", [](const ManifestObject& self) { return self.manifest->unit_bytes; },
          nb::for_getter(nb::sig("def unit_bytes(self) -> int")),
          "Bytes of the units that digests are of; 0: it has none (int).")
      .def_prop_ro(
          "bytes_written", [](const ManifestObject& self) { return bytes_written(*self.manifest); },
          nb::for_getter(nb::sig("def bytes_written(self) -> int")),
          "Bytes of the shards that its own commit wrote (int).")
      .def("shards", &shards, nb::sig("def shards(self) -> list[tuple[str, str, int, int]]"),
           "Volume, file, bytes and commit of each shard: the commit that wrote it.")
      .def("digests", &digests, "tensor"_a,
           nb::sig("def digests(self, tensor: int) -> list[tuple[int, bytes]]"),
           "Digests of the units of a tensor: the first unit of each run, and 16 bytes for each unit.")
      .def(
          "layouts", &layouts, "targets"_a, nb::kw_only(), "verify"_a, "fresh_from_bytes"_a,
          nb::sig("def layouts(self, targets: list[trunkline._types.WritableBuffer | None], *, verify: bool, "
                  "fresh_from_bytes: int) -> list[FileLayout | None]"),
          "Layouts that read the shards into a buffer for each tensor (None: it is not read, and neither are "
          "shards without any other); buffers of at least `fresh_from_bytes` are new memory.");
}

}  // namespace trunkline::python
