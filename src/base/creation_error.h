// Errors about directories that do not exist.
#pragma once

#include <string_view>

#include "trunkline/error.h"

namespace trunkline {

// As system_error(), with the advice to create `directory`, in which `action` was to create a file, where it
// does not exist.
Error creation_error(int code, std::string_view action, std::string_view path, std::string_view directory);

// As system_error(), with the advice to create `directory` where it does not exist. For directories that the
// library uses, and does not create.
Error missing_directory_error(int code, std::string_view action, std::string_view directory);

}  // namespace trunkline
