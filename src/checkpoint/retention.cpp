#include "checkpoint/retention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <functional>
#include <limits>
#include <ranges>
#include <span>
#include <utility>
#include <vector>

#include "base/log.h"

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
  return {.kind = ErrorKind::system,
          .code = EEXIST,
          .message = fmt::format(
              "{}: keep={} does not count or remove {}, which this Checkpointer has not loaded or saved, or "
              "which came back from a folder aside-*. delete() removes checkpoints; to continue an earlier "
              "run, call load() before the first save, and use one Checkpointer for all saves",
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

// Each removal is made durable before the next, so that many take seconds.
constexpr std::size_t kManyRemoved = 100;

// Its value of a metric; nothing where it has none, or one that is not a number.
Result<std::optional<double>> value_of(const Candidate& candidate, const std::string& directory,
                                       const std::string& name, KnownMetrics& known) {
  auto found = known.find(candidate.commit);
  if (found == known.end()) {
    auto manifest = read_manifest_of(directory, candidate.commit.step, candidate.commit.number);
    if (!manifest) return std::unexpected(manifest.error());
    found = known.emplace(candidate.commit, std::move(manifest->metrics)).first;
  }
  const auto metric = std::ranges::find(found->second, name, &Metric::name);
  if (metric == found->second.end() || std::isnan(metric->value)) return std::optional<double>();
  return std::optional(metric->value);
}

// The numbers of the commits with the best values, and of those whose values cannot be read. Of equal values
// the first commit is the better one.
std::set<std::uint64_t> find_best(const std::vector<Candidate>& candidates, const Retention& retention,
                                  KnownMetrics& known, std::vector<Error>& problems) {
  std::set<std::uint64_t> best;
  if (!retention.also.best) return best;
  const BestRule& rule = *retention.also.best;
  const double sign = rule.order == BestRule::Order::min ? 1 : -1;
  std::vector<std::pair<double, std::uint64_t>> ranking;
  for (const Candidate& each : candidates) {
    const auto value = value_of(each, retention.directory, rule.metric, known);
    if (!value) {
      problems.push_back(value.error());
      best.insert(each.commit.number);
    } else if (const std::optional<double> number = *value) {
      ranking.emplace_back(sign * *number, each.commit.number);
    }
  }
  std::ranges::sort(ranking);
  ranking.resize(std::min<std::size_t>(ranking.size(), rule.count));
  for (const auto& [value, number] : ranking) best.insert(number);
  std::erase_if(known, [&](const auto& each) {  // of checkpoints that are gone
    return std::ranges::none_of(candidates, [&](const Candidate& c) { return c.commit == each.first; });
  });
  return best;
}

}  // namespace

CollectionResult remove_superseded(const Retention& retention, std::vector<StepEntry> entries,
                                   const Continuation& known, RetentionMemory& memory,
                                   const DirectoryOps& ops) {
  std::erase_if(entries, [](const StepEntry& entry) { return entry.commits.empty(); });
  GarbageCollector collector(retention.directory, retention.descriptor, ops, GarbageCollector::DryRun::no);
  std::vector<Error> problems;
  std::vector<Candidate> ours;
  std::vector<Commit> strangers;  // all that are not this run's to remove, once there are more than are kept
  for (const Candidate& each : find_candidates(retention, entries, problems)) {
    if (each.commit.number < retention.descriptor.first_commit || !known.knows(each.commit))
      strangers.push_back(each.commit);
    else
      ours.push_back(each);
  }
  const std::uint64_t most = retention.keep.value_or(std::numeric_limits<std::uint64_t>::max());
  const std::set<std::uint64_t> best = find_best(ours, retention, memory.metrics, problems);
  const auto is_also_kept = [&](const Candidate& each) {
    const auto& every = retention.also.every;
    return (every && each.entry->step % *every == 0) || best.contains(each.commit.number) ||
           retention.also.steps.contains(each.entry->step);
  };
  std::vector<const StepEntry*> doomed;
  std::uint64_t kept = 0;  // as the last ones
  for (const Candidate& each : ours) {
    const bool is_among_last = kept < most || each.commit.number == retention.commit;
    if (!is_among_last && !is_also_kept(each)) {
      doomed.push_back(each.entry);
    } else {
      if (is_among_last) ++kept;
      if (each.entry->commits.size() > 1) collector.clean(*each.entry);
    }
  }
  if (kept + strangers.size() <= most) strangers.clear();
  if (!std::ranges::all_of(strangers, [&](const Commit& each) { return memory.reported.contains(each); })) {
    problems.push_back(not_removed(retention.directory, strangers, most));
    memory.reported.insert(strangers.begin(), strangers.end());
  }
  if (doomed.size() >= kManyRemoved) {
    const auto [first, last] =
        std::ranges::minmax(doomed, {}, [](const StepEntry* entry) { return entry->step; });
    log::warn(log::Component::checkpoint,
              "{}: keep={} removes {} checkpoints, of steps {} to {}; the save takes longer meanwhile",
              retention.directory, most, doomed.size(), first->step, last->step);
  }
  // In the reverse order, so that a crash leaves no gap: later steps, then the oldest.
  for (const StepEntry* entry : std::views::reverse(doomed)) {
    log::info(log::Component::checkpoint, "{}: removing step {}: keep={} (others that stay: {})",
              retention.directory, entry->step, most, ours.size() - doomed.size());
    collector.remove(*entry);
  }
  CollectionResult result = collector.take_result();
  result.problems.insert(result.problems.end(), problems.begin(), problems.end());
  return result;
}

}  // namespace trunkline::checkpoint
