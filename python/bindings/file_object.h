// The Python class File.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

#include "gil.h"
#include "trunkline/file.h"

namespace trunkline::python {

class FutureObject;

class FileObject {
 public:
  // `engine` nullopt: a file of the process's default engine. Raises what the opening or that engine's
  // creation fails with.
  FileObject(const std::optional<Engine>& engine, Result<File> opened);
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
  // Whether a blocking operation runs as one call of the library, often on this thread. A larger one is a
  // Future, so that Ctrl-C can cancel it; so is one that may have to wait for the work of a GPU.
  bool runs_inline(const MemoryView& memory) const;

  File file_;
  std::uint64_t inline_bytes_;
};

}  // namespace trunkline::python
