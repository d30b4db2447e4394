#include "checkpoint/retention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <limits>
#include <ranges>
#include <span>
#include <utility>
#include <vector>

#include "base/log.h"
#include "checkpoint/listing.h"

namespace trunkline::checkpoint {
namespace {

struct Candidate {
  const StepEntry* entry;
  Commit commit;
  bool is_later;  // of a step after the one that was saved: the run went back behind it
};

Error not_removed(const std::string& directory, std::span<const Commit> commits, std::uint64_t keep) {
  std::vector<std::uint64_t> steps;
  for (const Commit& commit : commits) steps.push_back(commit.step);
  std::ranges::sort(steps);
  return {
      .kind = ErrorKind::system,
      .code = EEXIST,
      .message = fmt::format(
          "{}: keep={} does not count or remove {}, which this Checkpointer has not loaded or saved, or "
          "which "
          "came back from a folder aside-*. delete() removes checkpoints; to continue an earlier run, call "
          "load() before the first save, and use one Checkpointer for all saves",
          directory, keep, in_words(steps)),
      .path = directory};
}

// Those that stay come first: a run that went back behind later steps gives them up before any other.
std::vector<Candidate> find_candidates(const Retention& retention, const std::vector<StepEntry>& entries,
                                       std::vector<Error>& problems) {
  std::vector<Candidate> candidates;
  for (const StepEntry& entry : entries) {
    const auto whole = check_manifest(retention.directory, entry.step, entry.commits.back());
    const auto commit = newest_commit(retention.directory, entry);
    if (whole && commit)
      candidates.push_back({&entry, *commit, entry.step > retention.step});
    else
      problems.push_back(whole ? commit.error() : whole.error());
  }
  std::ranges::sort(candidates, std::greater(),
                    [](const Candidate& each) { return std::pair(!each.is_later, each.commit.number); });
  return candidates;
}

}  // namespace

Result<CollectionResult> remove_superseded(const Retention& retention, const Continuation& known,
                                           std::set<Commit>& reported, const DirectoryOps& ops) {
  auto entries = list_steps(retention.directory);
  if (!entries) return std::unexpected(entries.error());
  std::erase_if(*entries, [](const StepEntry& entry) { return entry.commits.empty(); });
  // Without `keep` only what this save replaced goes: with thousands of steps, reading the manifest of each
  // would make every save slower than the one before.
  if (!retention.keep)
    std::erase_if(*entries, [&](const StepEntry& entry) { return entry.step != retention.step; });
  GarbageCollector collector(retention.directory, retention.descriptor, ops, GarbageCollector::DryRun::no);
  std::vector<Error> problems;
  std::vector<const StepEntry*> doomed;
  std::vector<Commit> strangers;  // all that are not this run's to remove, once there are more than are kept
  const std::uint64_t most = retention.keep.value_or(std::numeric_limits<std::uint64_t>::max());
  std::uint64_t kept = 0;
  for (const auto& [entry, commit, is_later] : find_candidates(retention, *entries, problems)) {
    if (commit.number < retention.descriptor.first_commit || !known.knows(commit)) {
      strangers.push_back(commit);
    } else if (kept >= most && commit.number != retention.commit) {
      doomed.push_back(entry);
    } else {
      ++kept;
      if (entry->commits.size() > 1) collector.clean(*entry);
    }
  }
  if (kept + strangers.size() <= most) strangers.clear();
  if (!std::ranges::all_of(strangers, [&](const Commit& each) { return reported.contains(each); })) {
    problems.push_back(not_removed(retention.directory, strangers, most));
    reported.insert(strangers.begin(), strangers.end());
  }
  // In the reverse order, so that a crash leaves no gap: later steps, then the oldest.
  for (const StepEntry* entry : std::views::reverse(doomed)) {
    log::info(log::Component::checkpoint, "{}: removing step {}: keep={} (others that stay: {})",
              retention.directory, entry->step, most, kept);
    collector.remove(*entry);
  }
  CollectionResult result = collector.take_result();
  result.problems.insert(result.problems.end(), problems.begin(), problems.end());
  return result;
}

}  // namespace trunkline::checkpoint
