#include "cli/tune/tune_options.h"

#include <fmt/format.h>

#include <utility>

#include "base/invalid_argument.h"
#include "cli/tune/scratch_files.h"
#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

constexpr double kShortest_s = 5;
constexpr double kLongest_s = 24 * 3600;

}  // namespace

Status check(const TuneOptions& options) {
  if (options.forget && (!options.export_file.empty() || options.exhaustive_s > 0))
    return invalid_argument("--forget cannot be combined with --export or --exhaustive: it measures nothing");
  if (options.forget) return {};
  if (options.paths.empty())
    return invalid_argument("PATH is required: the directory to measure, or the directories of a volume");
  if (options.merge && options.export_file.empty())
    return invalid_argument("--merge has no effect without --export FILE");
  if (options.budget_s < kShortest_s || options.budget_s > kLongest_s)
    return invalid_argument(fmt::format("--budget: must be from 5 s to 24 h, not {} s", options.budget_s));
  if (options.size_bytes < kFewestScratchBytes)
    return invalid_argument(fmt::format("--size: must be at least {}", format_size(kFewestScratchBytes)));
  if (options.exhaustive_s > 0 && !options.export_file.empty())
    return invalid_argument(
        "--export cannot be combined with --exhaustive, which compares settings and saves none");
  return {};
}

}  // namespace trunkline::cli
