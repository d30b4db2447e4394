#include "file_object.h"

#include <memory>

#include "arguments.h"
#include "buffer_view.h"
#include "errors.h"
#include "future_object.h"
#include "interruptible.h"

namespace trunkline::python {

namespace nb = nanobind;

namespace {

std::uint64_t inline_bytes_of(const std::optional<Engine>& engine) {
  if (engine) return engine->config().slot_bytes;
  return unwrap(Engine::default_engine()).config().slot_bytes;
}

}  // namespace

FileObject::FileObject(const std::optional<Engine>& engine, Result<File> opened)
    : file_(unwrap(std::move(opened))), inline_bytes_(inline_bytes_of(engine)) {}

bool FileObject::runs_inline(const MemoryView& memory) const {
  return memory.bytes <= inline_bytes_ && memory.device == nullptr;
}

std::uint64_t FileObject::pread(nb::handle buffer, nb::handle offset_value, nb::handle stream) const {
  const std::uint64_t offset = count_argument(offset_value, "offset");
  const BufferView view(buffer, Access::writable, "buffer", Reach::devices, stream);
  Result<std::uint64_t> result;
  Future future;
  {
    const GilReleased unlocked;
    if (runs_inline(view.memory())) {
      result = file_.pread(view.memory(), offset);
    } else {
      future = file_.async_pread(view.memory(), offset);
    }
  }
  return unwrap(future.valid() ? result_or_cancel(future) : std::move(result));
}

std::uint64_t FileObject::pwrite(nb::handle buffer, nb::handle offset_value, nb::handle stream) const {
  const std::uint64_t offset = count_argument(offset_value, "offset");
  const BufferView view(buffer, Access::read_only, "buffer", Reach::devices, stream);
  Result<std::uint64_t> result;
  Future future;
  {
    const GilReleased unlocked;
    if (runs_inline(view.memory())) {
      result = file_.pwrite(view.memory(), offset);
    } else {
      future = file_.async_pwrite(view.memory(), offset);
    }
  }
  return unwrap(future.valid() ? result_or_cancel(future) : std::move(result));
}

FutureObject* FileObject::async_pread(nb::handle buffer, nb::handle offset_value, nb::handle stream) const {
  const std::uint64_t offset = count_argument(offset_value, "offset");
  auto view = std::make_unique<BufferView>(buffer, Access::writable, "buffer", Reach::devices, stream);
  auto object = std::make_unique<FutureObject>(std::move(view));
  Future future;
  {
    const GilReleased unlocked;
    future = file_.async_pread(object->memory(), offset);
  }
  object->start(std::move(future));
  return object.release();
}

FutureObject* FileObject::async_pwrite(nb::handle buffer, nb::handle offset_value, nb::handle stream) const {
  const std::uint64_t offset = count_argument(offset_value, "offset");
  auto view = std::make_unique<BufferView>(buffer, Access::read_only, "buffer", Reach::devices, stream);
  auto object = std::make_unique<FutureObject>(std::move(view));
  Future future;
  {
    const GilReleased unlocked;
    future = file_.async_pwrite(object->memory(), offset);
  }
  object->start(std::move(future));
  return object.release();
}

std::uint64_t FileObject::size() const {
  Result<std::uint64_t> bytes = [&] {
    const GilReleased unlocked;
    return file_.size();
  }();
  return unwrap(std::move(bytes));
}

void FileObject::truncate(nb::handle bytes_value) const {
  const std::uint64_t bytes = size_argument(bytes_value, "nbytes");
  Status status = [&] {
    const GilReleased unlocked;
    return file_.truncate(bytes);
  }();
  unwrap(std::move(status));
}

void FileObject::sync() const {
  unwrap(call_interruptibly([file = file_] { return file.sync(); }));
}

void FileObject::close() const {
  if (file_.pending() == 0) {  // nothing to wait for: no thread beside
    Status status = [&] {
      const GilReleased unlocked;
      return file_.close();
    }();
    unwrap(std::move(status));
    return;
  }
  unwrap(call_interruptibly([file = file_] { return file.close(); }));
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
