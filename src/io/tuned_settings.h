// How an engine and its files follow a tuning. Options that the caller gave always win. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "io/file/file_core.h"
#include "os/file_pair.h"
#include "trunkline/engine.h"
#include "tuning/tuning.h"

namespace trunkline::io {

// The options with which an engine is created; nullopt where the settings change nothing. `block`: with its
// block size, too, which otherwise follows the files. Lanes and queue depth were measured with the tuning's
// backend, and are left alone for another.
std::optional<EngineOptions> tuned_options(const EngineOptions& options, const tuning::Settings& settings,
                                           bool block);

os::DirectPolicy tuned_policy(const EngineConfig& config, Direct direct, const tuning::Tuning* tuning);

// The block size for a file that is open; 0 for the engine's: not tuned, passed by the caller, or one that
// this engine's slots, or direct I/O on the file, do not support.
std::uint64_t tuned_block_bytes(const EngineConfig& config, bool block_was_passed, const FileCore& file,
                                const tuning::Tuning* tuning);

// What the engine follows of the tuning for a file with these `limits`. `problem`: why none was found; empty
// where nothing was tuned.
TuningExplanation explain_tuning(const EngineConfig& config, bool block_was_passed,
                                 const os::DirectLimits& limits, const tuning::Tuning* tuning,
                                 std::string_view problem);

}  // namespace trunkline::io
