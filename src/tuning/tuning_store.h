// Where tunings are kept: one file for each user.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "trunkline/error.h"
#include "tuning/tuning.h"

namespace trunkline::tuning {

// Whether the environment variable TRUNKLINE_TUNING is "off".
bool is_off();

// The file: the value of TRUNKLINE_TUNING; where that is unset, empty or "off",
// $XDG_CONFIG_HOME/trunkline/tuning.json, in $HOME/.config without XDG_CONFIG_HOME
// (https://specifications.freedesktop.org/basedir-spec/latest). nullopt where none of them is set.
std::optional<std::string> default_file();

// All tunings of a file; none where it does not exist.
Result<std::vector<Tuning>> load(const std::string& file);

// Adds a tuning, or replaces that of the same machine and storages, atomically and durably; creates the
// file's directory. A file that is damaged is set aside as FILE.damaged, or FILE.damaged-2 and so on. Fails
// with `unsupported` where it is of a newer version, with invalid_argument where it is no file (/dev/null),
// with system (EBUSY) where another process holds the lock for seconds.
Status store(const std::string& file, const Tuning& tuning);

// Whether store() would reject the file, to be known before measuring for a minute.
Status check_storable(const std::string& file);

// Removes the tunings of exactly these paths: of their storages on this machine, or as they were named, for
// paths that no longer exist. Returns how many.
Result<std::size_t> forget(const std::string& file, std::span<const std::string> paths);

// Removes the file; false where it does not exist. What cannot be read as tunings may be of another program:
// it is set aside as by store().
Result<bool> forget_all(const std::string& file);

}  // namespace trunkline::tuning
