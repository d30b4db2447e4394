// Opens the member files of one logical file: one for a plain file, several for a striped one.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "io/file/layout.h"
#include "os/file_pair.h"
#include "trunkline/file.h"

namespace trunkline::io {

inline constexpr mode_t kUsualPermissions = 0666;

// `engine` nullopt: the process's default engine, looked up at each call. `paths` has one path for each
// member of `layout`. `name` is what error messages and File::path() call the file. With several members
// their sizes must fit each other (`corrupt` names the one that does not). `permissions`: of files that are
// created, minus the umask. `lookup`: as for os::open_pair.
Result<File> open_members(const std::optional<Engine>& engine, const std::vector<std::string>& paths,
                          const Layout& layout, const OpenOptions& options, const std::string& name,
                          mode_t permissions = kUsualPermissions, os::Lookup lookup = os::Lookup::any);

}  // namespace trunkline::io
