// What the command line returns to its caller; the same for every command.
#pragma once

namespace trunkline::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;  // the work was tried and did not succeed
inline constexpr int kExitUsage = 2;   // the request itself cannot be met; nothing was done

}  // namespace trunkline::cli
