// What is at a path, for those who need not know why nothing can be seen there.
#pragma once

#include <string>

namespace trunkline::os {

// Whether the path itself names something, be it a dangling symbolic link. False where that cannot be
// determined.
bool exists(const std::string& path);

// Whether the path names a directory, or a symbolic link to one. False where that cannot be determined.
bool is_directory(const std::string& path);

// Whether the path itself names a symbolic link. False where that cannot be determined.
bool is_symlink(const std::string& path);

}  // namespace trunkline::os
