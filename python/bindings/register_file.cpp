#include <array>
#include <cerrno>
#include <functional>
#include <set>
#include <string>
#include <string_view>

#include "arguments.h"
#include "bindings.h"
#include "engine_object.h"
#include "errors.h"
#include "file_object.h"
#include "future_object.h"
#include "interruptible.h"
#include "io/file/file_core.h"
#include "io/file/open_members.h"
#include "trunkline/volume.h"

namespace trunkline::python {

using namespace nb::literals;

namespace {

// [dir, dir, ..., name] or ([dir, dir, ...], name).
Result<File> open_striped(nb::handle path, const std::optional<Engine>& engine, const OpenOptions& options) {
  const nb::sequence parts = nb::borrow<nb::sequence>(path);
  const std::size_t count = nb::len(parts);
  if (count < 2) {
    raise_value_error(
        "path: a list must contain directories, then a name, as in [\"/disk0\", \"/disk1\", \"weights\"]");
  }
  const std::string name = path_argument(parts[count - 1], "path");
  const nb::object first = parts[0];
  const bool nested = count == 2 && (PyList_Check(first.ptr()) || PyTuple_Check(first.ptr()));
  std::vector<std::string> directories = paths_argument(
      nested ? first : nb::object(parts[nb::slice(nb::int_(0), nb::int_(count - 1), nb::none())]), "path");
  return call_interruptibly([directories = std::move(directories), name, engine, options]() -> Result<File> {
    Result<Volume> volume = Volume::create(directories);
    if (!volume) return std::unexpected(volume.error());
    return engine ? volume->open(*engine, name, options) : volume->open(name, options);
  });
}

// Directories in which opening a file, with direct I/O or without, took only lookups in a local filesystem.
// Guarded by the GIL.
class LocalDirectories {
 public:
  static bool has(std::string_view path, Direct direct) { return names(direct).contains(directory(path)); }

  static void add(const File& file) {
    constexpr std::size_t kMost = 256;
    const os::FilePair& pair = file.core()->members.front().pair;
    if (!pair.local || pair.probed) return;
    Names& known = names(file.core()->options.direct);
    if (known.size() == kMost) known.clear();
    known.emplace(directory(file.path()));
  }

 private:
  using Names = std::set<std::string, std::less<>>;

  static std::string_view directory(std::string_view path) { return path.substr(0, path.rfind('/') + 1); }
  static Names& names(Direct direct) {
    static auto* names = new std::array<Names, 2>;  // used until the process ends
    return (*names)[direct == Direct::never ? 0 : 1];
  }
};

// Opening in another thread keeps the main one interruptible, but costs many times as much as the opening if
// the kernel has the directories cached. Files that are known to be local are first opened from the cache
// alone. On network and FUSE filesystems even that can block.
Result<File> open_plain(const std::string& path, const std::optional<Engine>& engine,
                        const OpenOptions& options) {
  const bool exists = options.mode == Mode::read || options.mode == Mode::read_write;
  if (on_main_thread() && exists && LocalDirectories::has(path, options.direct)) {
    Result<File> file = call_unlocked([&] {
      return io::open_members(engine, {path}, {}, options, path, io::kUsualPermissions, os::Lookup::cached);
    });
    if (file || file.error().code != EAGAIN) return file;
  }
  Result<File> file = call_interruptibly(
      [path, engine, options] { return io::open_members(engine, {path}, {}, options, path); });
  if (file && exists) LocalDirectories::add(*file);
  return file;
}

FileObject* open(nb::handle path, nb::handle mode, nb::handle engine_value, nb::handle direct) {
  const std::optional<Engine> engine = engine_argument(engine_value);
  const OpenOptions options = open_options_argument(mode, direct);
  if (PyList_Check(path.ptr()) || PyTuple_Check(path.ptr())) {
    return new FileObject(open_striped(path, engine, options));
  }
  const std::string name = path_argument(path, "path");
  return new FileObject(open_plain(name, engine, options));
}

nb::object repr(const FileObject& self) {
  return nb::str("<trunkline.File {!r} mode={!r}>").format(decode_path(self.file().path()), self.mode());
}

using FileClass = nb::class_<FileObject>;

void define_transfers(FileClass& file) {
  file.def("pread", &FileObject::pread, "buffer"_a.none(), "offset"_a.none() = 0, nb::kw_only(),
           "stream"_a = nb::none(),
           nb::sig("def pread(self, buffer: trunkline._types.WritableBuffer, offset: int = 0, *, stream: "
                   "object = None) -> int"),
           "Fills all of `buffer` from `offset` and returns its size in bytes.\n\n"
           "Raises EndOfFile if the file ends before, another trunkline.Error if reading fails. Other "
           "threads\n"
           "run meanwhile. Ctrl-C cancels a read of more than 1 MiB; a smaller one is a single system call, "
           "and\n"
           "Ctrl-C takes effect after it. If it must not wait for a device that hangs, use\n"
           "async_pread().result().")
      .def("pwrite", &FileObject::pwrite, "buffer"_a.none(), "offset"_a.none() = 0, nb::kw_only(),
           "stream"_a = nb::none(),
           nb::sig("def pwrite(self, buffer: trunkline._types.ReadableBuffer, offset: int = 0, *, stream: "
                   "object = None) -> int"),
           "Writes all of `buffer` at `offset` and returns its size in bytes.\n\n"
           "Not durable before sync(). Raises trunkline.Error if writing fails; the bytes of the range are "
           "then\n"
           "unspecified. Other threads run meanwhile; Ctrl-C acts as in pread.")
      .def("async_pread", &FileObject::async_pread, "buffer"_a.none(), "offset"_a.none() = 0, nb::kw_only(),
           "stream"_a = nb::none(),
           nb::sig("def async_pread(self, buffer: trunkline._types.WritableBuffer, offset: int = 0, *, "
                   "stream: object = None) -> Future"),
           "Submits a pread and returns its Future, which keeps `buffer` alive until the operation is "
           "done.\n\n"
           "Waits only while the engine's queue is full. Raises for an invalid argument; the Future raises\n"
           "errors of reading.")
      .def("async_pwrite", &FileObject::async_pwrite, "buffer"_a.none(), "offset"_a.none() = 0, nb::kw_only(),
           "stream"_a = nb::none(),
           nb::sig("def async_pwrite(self, buffer: trunkline._types.ReadableBuffer, offset: int = 0, *, "
                   "stream: object = None) -> Future"),
           "Submits a pwrite and returns its Future, which keeps `buffer` alive until the operation is "
           "done.\n\n"
           "The buffer must not change before that. Waits only while the engine's queue is full. Raises for "
           "an\n"
           "invalid argument; the Future raises errors of writing.");
}

void define_state(FileClass& file) {
  file.def_prop_ro("size", &FileObject::size, "Size of the file in bytes (int).")
      .def_prop_ro(
          "path", [](const FileObject& self) { return decode_path(self.file().path()); },
          nb::for_getter(nb::sig("def path(self) -> str")), "The path it was opened by (str).")
      .def_prop_ro("mode", &FileObject::mode, "\"r\", \"r+\", \"w\" or \"x\" (str).")
      .def("truncate", &FileObject::truncate, "nbytes"_a.none(),
           nb::sig("def truncate(self, nbytes: int | str) -> None"),
           "Sets the size of the file: truncates it, or extends it with zeros.")
      .def(
          "sync", &FileObject::sync,
          "Waits for writes submitted before, then makes data and size durable (fsync).\n\n"
          "A failure is final: every later sync and write of the file raises it again. Ctrl-C ends the wait.")
      .def("close", &FileObject::close,
           "Waits for the file's pending operations, then closes it. Later operations raise Error (EBADF). "
           "Idempotent.")
      .def(
          "__enter__", [](nb::handle_t<FileObject> self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> typing_extensions.Self"))
      .def(
          "__exit__", [](const FileObject& self, const nb::args&) { self.close(); },
          nb::sig("def __exit__(self, *exc: object) -> None"))
      .def("__repr__", &repr, nb::sig("def __repr__(self) -> str"));
}

void define_open(nb::module_& module) {
  module.def(
      "open", &open, "path"_a.none(), "mode"_a.none() = "r", nb::kw_only(), "engine"_a = nb::none(),
      "direct"_a.none() = "auto",
      nb::sig("def open(path: trunkline._types.Path | trunkline._types.StripedPath, mode: "
              "trunkline._types.Mode = 'r', "
              "*, engine: Engine | None = None, direct: trunkline._types.Direct = 'auto') -> File"),
      "Opens a file.\n\n"
      "path: str, bytes or os.PathLike; or a list of directories and a name, [dir, dir, ..., name] or\n"
      "([dir, dir, ...], name), for a file striped over them (see Volume). mode: \"r\" and \"r+\" require "
      "an\n"
      "existing file, \"w\" creates or truncates it, \"x\" creates it and raises FileExistsError if it "
      "exists.\n"
      "engine: None is the default engine of the process; after a fork, that of the child. direct: \"auto\" "
      "uses\n"
      "direct I/O if the filesystem benefits from it, \"always\" (True) raises Unsupported if it is not\n"
      "available, \"never\" (False) uses the page cache, \"unless_cached\" is like \"auto\" but uses the "
      "page\n"
      "cache if that contains nearly all of the file when it is opened (for reading a whole file once), "
      "which\n"
      "the kernel reports from Linux 6.5 on for files that the process may write, except on overlayfs.");
}

}  // namespace

void register_file(nb::module_& module) {
  FileClass file(
      module, "File", nb::is_weak_referenceable(),
      "An open file, made by trunkline.open or Volume.open. Thread-safe; a context manager that closes.\n\n"
      "A buffer is a torch.Tensor, a numpy array, or any object with the buffer protocol, DLPack or "
      "__cuda_array_interface__:\n"
      "contiguous, in the memory of the CPU or a CUDA GPU, of any dtype; its bytes are not converted. "
      "Raises\n"
      "ValueError for buffers that are not contiguous, or read-only when reading. For a GPU's memory the\n"
      "operation is ordered after the work on `stream` (an object of torch, CuPy or Numba, or a CUstream as "
      "an\n"
      "int; None: torch's current stream, or the one that the array names); once it is done, the bytes are\n"
      "visible to every stream.\n"
      "Offsets are bytes from the file's start. Operations on overlapping ranges run in no particular order\n"
      "unless one is awaited before the next is submitted.");
  define_transfers(file);
  define_state(file);
  define_open(module);
}

}  // namespace trunkline::python
