// Tensors in safetensors files and in checkpoints, read at the speed of the device: what an inference engine
// in C++ needs to load a model's weights.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/engine.h"
#include "trunkline/error.h"
#include "trunkline/memory.h"

namespace trunkline {

struct TensorInfo {
  std::string name;
  std::string dtype;  // as safetensors names it: "F32", "BF16", "F8_E4M3", ...; in checkpoints also as torch
                      // does ("torch.complex128")
  std::vector<std::uint64_t> shape;  // in elements; row-major
  std::uint64_t bytes = 0;           // of all elements together
};

enum class Verify {
  automatic,  // against the checksums that were stored with the file; a file without any is read as it is
  always,     // opening a file without checksums fails with format
  never,      // reads nothing but the tensors
};

struct TensorReaderOptions {
  Verify verify = Verify::automatic;
  unsigned workers = 2;  // threads of one read() that compute checksums and copy; 1 .. 64
};

// A tensor to read, and where to. In host memory or on a GPU, where the read starts after the work that is
// queued on the view's stream.
struct TensorRead {
  std::string_view name;
  MemoryView memory;  // of exactly the tensor's bytes
};

// Open files of tensors. A shared handle: copies refer to the same files, which the last one closes. Every
// member function is thread-safe. What was opened is what is read, also when the files are replaced or
// removed meanwhile (but not when they are changed in place).
class TensorReader {
 public:
  TensorReader() = default;  // nothing; only valid() may be called

  // `path` is one of
  // - a safetensors file
  // - a directory of a model: its model.safetensors, or the files that its model.safetensors.index.json names
  // - a step of a directory of checkpoints (RUN/step-00000100), or that directory (RUN: the step committed
  //   last)
  // Reads headers and manifests only. Fails with system (ENOENT, ...), format for a file that is not valid,
  // and corrupt for damage to what it reads.
  static Result<TensorReader> open(const Engine& engine, const std::string& path,
                                   const TensorReaderOptions& options = {});
  // With the process's default engine.
  static Result<TensorReader> open(const std::string& path, const TensorReaderOptions& options = {});

  bool valid() const { return impl_ != nullptr; }

  // In the order of the files and of their bytes. Valid as long as a handle is. Of tensors in a checkpoint
  // that share memory, such as tied weights, only the one whose bytes were written is here; `state` in the
  // manifest (docs/formats/checkpoint.md) describes the others.
  std::span<const TensorInfo> tensors() const;
  const TensorInfo* find(std::string_view name) const;  // nullptr: there is none
  // `__metadata__` of a safetensors file, without our checksums. Empty for checkpoints; of several files
  // together, of equal keys the first file's.
  const std::map<std::string, std::string>& metadata() const;
  bool has_checksums() const;  // of everything that was opened

  // Fill the memory, or return the first error: invalid_argument names a tensor that does not exist, is
  // listed twice, or has another size than its memory; corrupt names the tensors in a range whose checksum
  // is wrong. After an error the contents of the memory are unspecified.
  //
  // All reads of a call are in flight together, over all files; memory at multiples of 4096 bytes is read
  // into without a copy where the tensor lies at one too. With checksums, whole ranges of them (1 MiB) are
  // read, so one call for many tensors reads less than a call for each.
  Status read(std::string_view name, MemoryView memory) const;
  Status read(std::span<const TensorRead> reads) const;

 private:
  struct Impl;
  explicit TensorReader(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

  std::shared_ptr<const Impl> impl_;
};

}  // namespace trunkline
