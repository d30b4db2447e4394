// Reads a checkpoint back to check that it is still what was written.
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

// One problem with a shard.
struct Mismatch {
  enum class Kind {
    missing,   // the file does not exist
    size,      // its size differs from the manifest's
    unread,    // the file or a chunk of it could not be read, which says nothing about its contents
    checksum,  // a chunk differs from what was written
  };
  Kind kind = Kind::checksum;
  std::uint64_t shard = 0;  // index into Manifest::shards
  std::string path = {};
  std::optional<std::uint64_t> chunk = {};  // its index in the file; nullopt for the whole file
  std::uint64_t offset = 0;                 // of the chunk, in bytes from the start of the file ...
  std::uint64_t bytes = 0;                  // ... and its size; for `size` that of the file
  std::vector<std::string> tensors = {};    // with bytes in the chunk or, without one, in the file
  std::string message = {};                 // all of that, and the cause
  int code = 0;                             // for `unread` the errno; 0 where there is none
};
std::string_view to_string(Mismatch::Kind kind);

struct VerifyOptions {
  // Called on the caller's thread a few times a second and at the end, with the number of bytes done.
  std::function<void(std::uint64_t bytes_done)> on_progress = {};
  std::function<bool()> cancelled = {};  // called as often; returning true ends verification with `cancelled`
};

struct VerifyReport {
  std::uint64_t bytes = 0;           // number of bytes read
  std::vector<Mismatch> mismatches;  // all of them, by shard and position
};

std::uint64_t bytes_to_verify(const Manifest& manifest);

// Reads every shard of the manifest, which belongs to a step of `directory`, and compares the checksums of
// all chunks. Shards on different volumes are read concurrently. Memory comes from the engine's budget: 64
// MiB, or less if less is left. Problems with the shards are in the report; an Error is what keeps the
// verification itself from continuing. No I/O is in flight any more when this returns.
Result<VerifyReport> verify(const Engine& engine, const std::string& directory, const Manifest& manifest,
                            const VerifyOptions& options = {});

}  // namespace trunkline::checkpoint
