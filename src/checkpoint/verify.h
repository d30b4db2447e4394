// Reading a checkpoint back to see whether it is still what was written.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "trunkline/engine.h"
#include "trunkline/error.h"

namespace trunkline::checkpoint {

// One thing that is wrong with a shard.
struct Mismatch {
  enum class Kind {
    missing,   // the file is not there
    size,      // it has another size than the manifest says
    unread,    // the file or a chunk of it could not be read, which says nothing about its contents
    checksum,  // a chunk is not what was written
  };
  Kind kind = Kind::checksum;
  std::uint64_t shard = 0;  // index into Manifest::shards
  std::string path = {};
  std::optional<std::uint64_t> chunk = {};  // its number in the file; none for the whole file
  std::uint64_t offset = 0;                 // of the chunk, in bytes from the start of the file ...
  std::uint64_t bytes = 0;                  // ... and its size; for `size` that of the file
  std::vector<std::string> tensors = {};    // with bytes in the chunk or, without one, in the file
  std::string message = {};                 // all of that, and the cause
  int code = 0;                             // for `unread` the errno; 0 where there is none
};
std::string_view to_string(Mismatch::Kind kind);

struct VerifyOptions {
  // Called on the caller's thread a few times a second and at the end, with bytes that are done.
  std::function<void(std::uint64_t bytes_done)> on_progress = {};
  std::function<bool()> cancelled = {};  // asked as often; true ends it with `cancelled`
};

struct VerifyReport {
  std::uint64_t bytes = 0;           // that were read
  std::vector<Mismatch> mismatches;  // by shard and place; all of them
};

std::uint64_t bytes_to_verify(const Manifest& manifest);

// Reads every shard of the manifest, which lies in a step of `directory`, and compares the checksums of all
// chunks. Shards on different volumes are read at the same time. Memory comes from the engine's budget: 64
// MiB, or less where that does not have it. What is wrong with the shards is in the report; an Error is what
// keeps the verification itself from going on. Nothing is read or written any more when this returns.
Result<VerifyReport> verify(const Engine& engine, const std::string& directory, const Manifest& manifest,
                            const VerifyOptions& options = {});

}  // namespace trunkline::checkpoint
