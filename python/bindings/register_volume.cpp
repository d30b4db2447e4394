#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "bindings.h"
#include "engine_object.h"
#include "errors.h"
#include "file_object.h"
#include "interruptible.h"
#include "trunkline/volume.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

void create(Volume* self, nb::handle directories_value, nb::handle stripe_bytes) {
  VolumeOptions options;
  if (!stripe_bytes.is_none()) options.stripe_bytes = size_argument(stripe_bytes, "stripe_bytes");
  std::vector<std::string> directories = paths_argument(directories_value, "directories");
  new (self) Volume(unwrap(call_interruptibly(
      [directories = std::move(directories), options] { return Volume::create(directories, options); })));
}

FileObject* open(const Volume& self, nb::handle name_value, nb::handle mode, nb::handle engine_value,
                 nb::handle direct) {
  const std::string name = path_argument(name_value, "name");
  const std::optional<Engine> engine = engine_argument(engine_value);
  const OpenOptions options = open_options_argument(mode, direct);
  return new FileObject(call_interruptibly([volume = self, name, engine, options] {
    return engine ? volume.open(*engine, name, options) : volume.open(name, options);
  }));
}

void remove(const Volume& self, nb::handle name_value) {
  const std::string name = path_argument(name_value, "name");
  unwrap(call_interruptibly([volume = self, name] { return volume.remove(name); }));
}

std::vector<nb::object> decode_all(const std::vector<std::string>& names) {
  std::vector<nb::object> decoded;
  for (const std::string& name : names) decoded.push_back(decode_path(name));
  return decoded;
}

std::vector<nb::object> list(const Volume& self) {
  return decode_all(unwrap(call_interruptibly([volume = self] { return volume.list(); })));
}

}  // namespace

void register_volume(nb::module_& module) {
  nb::class_<Volume>(module, "Volume",
                     "Several directories, each on its own disk, as one: files striped over all of them.\n\n"
                     "directories: existing and distinct, always in the same order. stripe_bytes: the "
                     "stripe unit of new\n"
                     "files, a multiple of 4096 (int or str; None: 1 MiB). Thread-safe.")
      .def("__init__", &create, "directories"_a.none(), "stripe_bytes"_a = nb::none(),
           nb::sig("def __init__(self, directories: collections.abc.Sequence[trunkline._types.Path], "
                   "stripe_bytes: int | str | "
                   "None = None) -> None"))
      .def(
          "open", &open, "name"_a.none(), "mode"_a.none() = "r", nb::kw_only(), "engine"_a = nb::none(),
          "direct"_a.none() = "auto",
          nb::sig("def open(self, name: trunkline._types.Path, mode: trunkline._types.Mode = 'r', *, "
                  "engine: Engine | None = "
                  "None, direct: trunkline._types.Direct = 'auto') -> File"),
          "Opens the file `name` of the volume; arguments as for trunkline.open.\n\n"
          "Raises Corrupt if a member is missing, belongs to another file, or has a size that does not match "
          "the others,\n"
          "Format if a descriptor is invalid or of a newer version.")
      .def("remove", &remove, "name"_a.none(),
           nb::sig("def remove(self, name: trunkline._types.Path) -> None"),
           "Removes the file `name` from all directories. Raises FileNotFoundError if it does not exist.")
      .def("list", &list, nb::sig("def list(self) -> typing.List[str]"),
           "Names of the volume's files, sorted (list of str).")
      .def_prop_ro(
          "directories", [](const Volume& self) { return decode_all(self.directories()); },
          nb::for_getter(nb::sig("def directories(self) -> typing.List[str]")),
          "The directories, in their order (list of str).")
      .def_prop_ro("stripe_bytes", &Volume::stripe_bytes, "Stripe unit of new files, in bytes (int).")
      .def("__repr__", [](const Volume& self) {
        return nb::str("<trunkline.Volume {!r} stripe_bytes={}>")
            .format(decode_all(self.directories()), self.stripe_bytes());
      });
}

}  // namespace trunkline::python
