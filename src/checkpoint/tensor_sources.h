// Open files of tensors: safetensors files, the files of a model, and the shards of a step, all described
// alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trunkline/engine.h"
#include "trunkline/error.h"
#include "trunkline/file.h"
#include "trunkline/tensors.h"

namespace trunkline::checkpoint {

struct SourceFile {
  File file;  // open for reading
  std::string path;
  std::uint64_t bytes = 0;
  // The CRC-32C of each `chunk_bytes` from checksums_begin on, the last of which may be shorter; empty: none.
  std::uint64_t checksums_begin = 0;
  std::uint64_t chunk_bytes = 0;
  std::vector<std::uint32_t> crc32c = {};
  bool has_checksums = false;
};

// Contiguous bytes of a tensor.
struct SourcePiece {
  std::size_t file = 0;
  std::uint64_t offset = 0;  // bytes from the file's start
  std::uint64_t bytes = 0;
};

struct TensorSources {
  std::vector<SourceFile> files;
  std::vector<TensorInfo> tensors;               // distinct names
  std::vector<std::vector<SourcePiece>> pieces;  // of each tensor, in the order of its bytes
  std::map<std::string, std::string> metadata;
};

// `path` as for TensorReader::open(). Without `checksums` those of safetensors files are neither looked for
// nor checked.
Result<TensorSources> open_tensor_sources(const Engine& engine, const std::string& path, bool checksums);

}  // namespace trunkline::checkpoint
