// The exit statuses of the command line; the same for every command.
#pragma once

namespace trunkline::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;  // the work was attempted and failed
inline constexpr int kExitUsage = 2;   // the request itself is invalid; nothing was done

}  // namespace trunkline::cli
