#include "file_object.h"

#include <algorithm>
#include <memory>

#include "arguments.h"
#include "buffer_view.h"
#include "errors.h"
#include "future_object.h"
#include "interruptible.h"
#include "io/engine_core.h"
#include "io/file/file_core.h"

namespace trunkline::python {

namespace nb = nanobind;

namespace {

// The engine that a file's operations are submitted to.
Engine engine_of(const File& file) { return unwrap(file.core()->engine()); }

std::unique_ptr<BufferView> view_of(nb::handle buffer, Op op, nb::handle stream) {
  return std::make_unique<BufferView>(buffer, op == Op::read ? Access::writable : Access::read_only, "buffer",
                                      Reach::devices, stream);
}

// Even closing can block: files of network and FUSE filesystems, and devices.
bool is_local(const File& file) {
  const auto& members = file.core()->members;
  return std::ranges::all_of(members, [](const io::Member& member) { return member.pair.local; });
}

}  // namespace

FileObject::FileObject(Result<File> opened) : file_(unwrap(std::move(opened))), local_(is_local(file_)) {}

std::unique_ptr<FutureObject> FileObject::submit(Op op, std::unique_ptr<BufferView> view,
                                                 std::uint64_t offset) const {
  auto object = std::make_unique<FutureObject>(std::move(view));
  const Request request{.op = op, .file = &file_, .memory = object->memory(), .offset = offset};
  submit_interruptibly(engine_of(file_), {&request, 1}, {&object, 1});
  return object;
}

// A small operation is a system call of this thread, which is cheapest; Ctrl-C takes effect after it, as with
// os.pread. One that is larger, queued, or on a GPU is a Future, whose wait Ctrl-C ends.
std::uint64_t FileObject::move(Op op, nb::handle buffer, nb::handle offset_value, nb::handle stream) const {
  const std::uint64_t offset = count_argument(offset_value, "offset");
  std::unique_ptr<BufferView> view = view_of(buffer, op, stream);
  const Engine engine = engine_of(file_);
  if (!engine.core()->runs_inline(view->memory()))
    return unwrap(result_or_cancel(submit(op, std::move(view), offset)));
  Result<std::uint64_t> result = [&] {
    const GilReleased unlocked;
    return engine.core()->run(op, file_.core(), view->memory(), offset);
  }();
  return unwrap(std::move(result));
}

std::uint64_t FileObject::pread(nb::handle buffer, nb::handle offset, nb::handle stream) const {
  return move(Op::read, buffer, offset, stream);
}

std::uint64_t FileObject::pwrite(nb::handle buffer, nb::handle offset, nb::handle stream) const {
  return move(Op::write, buffer, offset, stream);
}

FutureObject* FileObject::async_pread(nb::handle buffer, nb::handle offset, nb::handle stream) const {
  const std::uint64_t start = count_argument(offset, "offset");
  return submit(Op::read, view_of(buffer, Op::read, stream), start).release();
}

FutureObject* FileObject::async_pwrite(nb::handle buffer, nb::handle offset, nb::handle stream) const {
  const std::uint64_t start = count_argument(offset, "offset");
  return submit(Op::write, view_of(buffer, Op::write, stream), start).release();
}

std::uint64_t FileObject::size() const {
  const auto call = [file = file_] { return file.size(); };
  return unwrap(local_ ? call_unlocked(call) : call_interruptibly(call));
}

void FileObject::truncate(nb::handle bytes_value) const {
  const std::uint64_t bytes = size_argument(bytes_value, "nbytes");
  unwrap(call_interruptibly([file = file_, bytes] { return file.truncate(bytes); }));
}

void FileObject::sync() const {
  unwrap(call_interruptibly([file = file_] { return file.sync(); }));
}

void FileObject::close() const {
  const auto call = [file = file_] { return file.close(); };
  unwrap(local_ && file_.pending() == 0 ? call_unlocked(call) : call_interruptibly(call));
}

const char* FileObject::mode() const {
  switch (file_.mode()) {
    case Mode::read:
      return "r";
    case Mode::read_write:
      return "r+";
    case Mode::write:
      return "w";
    case Mode::create:
      return "x";
  }
  return "";
}

}  // namespace trunkline::python
