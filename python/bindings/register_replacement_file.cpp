#include <memory>
#include <string>
#include <utility>

#include "arguments.h"
#include "bindings.h"
#include "errors.h"
#include "interruptible.h"
#include "os/durable.h"
#include "os/replacement_file.h"
#include "os/temporary_file.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

// Calls that a signal has interrupted go on: they share the file.
class ReplacementFileObject {
 public:
  explicit ReplacementFileObject(nb::handle path_value) {
    const std::string path = path_argument(path_value, "path");
    file_ = unwrap(call_interruptibly([path]() -> Result<std::shared_ptr<os::ReplacementFile>> {
      auto created = os::ReplacementFile::create(path);
      if (!created) return std::unexpected(created.error());
      os::remove_dead_temporary_files_sometimes(os::directory_of(created->path()));
      return std::make_shared<os::ReplacementFile>(std::move(*created));
    }));
  }

  int fileno() const { return file().fd(); }

  void finish() {
    file();
    unwrap(call_interruptibly([file = std::exchange(file_, nullptr)]() -> Status {
      const auto directory = file->finish();
      if (!directory) return std::unexpected(directory.error());
      return os::fsync_directory(*directory);
    }));
  }

  void discard() { file_.reset(); }

 private:
  const os::ReplacementFile& file() const {
    if (!file_) raise_value_error("the file is finished or discarded");
    return *file_;
  }

  std::shared_ptr<os::ReplacementFile> file_;
};

}  // namespace

void register_replacement_file(nb::module_& module) {
  nb::class_<ReplacementFileObject>(
      module, "ReplacementFile",
      "A file that is written under a temporary name; finish() gives it its own. Links are followed, and "
      "mode,\n"
      "owner, group and extended attributes of a file that it replaces are kept. Temporary files that dead\n"
      "processes left in its folder are removed. Private.")
      .def(nb::init<nb::handle>(), "path"_a.none(),
           nb::sig("def __init__(self, path: trunkline._types.Path) -> None"))
      .def("fileno", &ReplacementFileObject::fileno, "Its descriptor, open for writing until the end.")
      .def("finish", &ReplacementFileObject::finish, "Makes the file durable, under its own name.")
      .def("discard", &ReplacementFileObject::discard, "Removes the temporary file, if it is not finished.");
}

}  // namespace trunkline::python
