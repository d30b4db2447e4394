// The Python class File.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "gil.h"
#include "trunkline/file.h"

namespace trunkline::python {

class BufferView;
class FutureObject;

class FileObject {
 public:
  // Raises the error of the opening, if it failed.
  explicit FileObject(Result<File> opened);
  FileObject(const FileObject&) = delete;
  FileObject& operator=(const FileObject&) = delete;
  ~FileObject() {
    const GilReleased unlocked;  // the last handle of a file closes it
    file_ = File();
  }

  const File& file() const { return file_; }

  std::uint64_t pread(nanobind::handle buffer, nanobind::handle offset, nanobind::handle stream) const;
  std::uint64_t pwrite(nanobind::handle buffer, nanobind::handle offset, nanobind::handle stream) const;
  FutureObject* async_pread(nanobind::handle buffer, nanobind::handle offset, nanobind::handle stream) const;
  FutureObject* async_pwrite(nanobind::handle buffer, nanobind::handle offset, nanobind::handle stream) const;
  std::uint64_t size() const;
  void truncate(nanobind::handle bytes) const;
  void sync() const;
  void close() const;
  const char* mode() const;

 private:
  std::unique_ptr<FutureObject> submit(Op op, std::unique_ptr<BufferView> view, std::uint64_t offset) const;
  std::uint64_t move(Op op, nanobind::handle buffer, nanobind::handle offset, nanobind::handle stream) const;

  File file_;
  // Its size and close() need no system call that blocks, so this thread can call them itself.
  bool local_;
};

}  // namespace trunkline::python
