#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iostream>
#include <string>
#include <string_view>

#include "checkpoint/verify.h"
#include "cli/checkpoint/checkpoint_actions.h"
#include "cli/checkpoint/checkpoint_output.h"
#include "cli/engine_json.h"
#include "cli/interrupt.h"
#include "cli/progress.h"
#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

using checkpoint::Manifest;
using checkpoint::Mismatch;
using checkpoint::VerifyReport;
using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr std::chrono::seconds kProgressAfter{2};

Json to_json(const Mismatch& mismatch) {
  return {{"kind", to_string(mismatch.kind)}, {"path", mismatch.path},
          {"shard", mismatch.shard},          {"chunk", mismatch.chunk ? Json(*mismatch.chunk) : Json()},
          {"offset", mismatch.offset},        {"bytes", mismatch.bytes},
          {"tensors", mismatch.tensors},      {"message", mismatch.message}};
}

// The outcome for one step, as JSON and as text.
struct Verdict {
  bool ok = false;
  Json json;
  std::string text;
};

Verdict verdict_of(std::uint64_t step, const Error& error) {
  return {.json = {{"step", step}, {"ok", false}, {"error", error_json(error)}},
          .text = fmt::format("step {}: {}\n", step, printable(error.message))};
}

Verdict verdict_of(const Manifest& manifest, const VerifyReport& report, double seconds) {
  const bool ok = report.mismatches.empty();
  // A checkpoint that cannot be read may still be complete.
  const bool is_damaged = std::ranges::any_of(
      report.mismatches, [](const Mismatch& each) { return each.kind != Mismatch::Kind::unread; });
  const std::string_view state = ok ? "verified" : is_damaged ? "damaged" : "could not be read";
  const std::string rate =
      report.bytes == 0 ? "" : ", " + format_rate(static_cast<double>(report.bytes) / seconds);
  Verdict verdict{.ok = ok,
                  .json = {{"step", manifest.step},
                           {"commit", manifest.commit},
                           {"ok", ok},
                           {"bytes", report.bytes},
                           {"seconds", seconds},
                           {"mismatches", Json::array()}},
                  .text = fmt::format("step {}: {}, {} in {} shard{}{}\n", manifest.step,
                                      ok ? std::string(state)
                                         : fmt::format("{}, {} problem{}", state, report.mismatches.size(),
                                                       report.mismatches.size() == 1 ? "" : "s"),
                                      format_bytes(report.bytes), manifest.shards.size(),
                                      manifest.shards.size() == 1 ? "" : "s", rate)};
  for (const Mismatch& each : report.mismatches) {
    verdict.json["mismatches"].push_back(to_json(each));
    verdict.text += fmt::format("  {}\n", printable(each.message));
  }
  return verdict;
}

// For a step that existed a moment ago: a run that is saving removes its old ones. `ok`: whether that is
// fine.
Verdict removed_meanwhile(std::uint64_t step, bool ok) {
  return {.ok = ok,
          .json = {{"step", step}, {"ok", ok}, {"removed", true}},
          .text = fmt::format("step {}: not verified, another process removed it meanwhile\n", step)};
}

// Whether the files of the manifest have been removed since it was read, either along with the manifest or
// for a newer save of the step.
bool was_removed(const checkpoint::Store& store, const Manifest& manifest) {
  const auto now = store.read_manifest(manifest.step);
  return now ? now->shards != manifest.shards : now.error().code == ENOENT;
}

Result<Verdict> verify_step(const Engine& engine, const checkpoint::Store& store, std::uint64_t step,
                            bool all) {
  const auto manifest = store.read_manifest(step);
  if (!manifest && manifest.error().code == ENOENT) return removed_meanwhile(step, all);
  if (!manifest) return verdict_of(step, manifest.error());
  const bool terminal = ::isatty(STDERR_FILENO) == 1;
  Progress progress(std::cerr, terminal, Progress::Style::bar);
  const Clock::time_point began = Clock::now();
  progress.begin(fmt::format("step {}", step), bytes_to_verify(*manifest), 0, began);
  const auto show = [&](std::uint64_t bytes) {
    if (const auto now = Clock::now(); terminal && now - began >= kProgressAfter) progress.update(bytes, now);
  };
  const auto report = checkpoint::verify(engine, store.directory(), *manifest,
                                         {.on_progress = show, .cancelled = interrupted});
  progress.end();
  if (!report) return std::unexpected(report.error());
  if (!report->mismatches.empty() && was_removed(store, *manifest))
    return verify_step(engine, store, step, all);
  return verdict_of(*manifest, *report, std::chrono::duration<double>(Clock::now() - began).count());
}

Result<std::vector<std::uint64_t>> steps_to_verify(const checkpoint::Store& store,
                                                   const CheckpointArguments& arguments) {
  if (arguments.all) {
    auto steps = store.steps();
    // Verifying nothing is not success: a job may rely on the exit status.
    if (steps && steps->empty()) return std::unexpected(no_checkpoint(store));
    return steps;
  }
  const auto step = chosen_step(store, arguments);
  if (!step) return std::unexpected(step.error());
  // A step that does not exist is the caller's mistake, not damage.
  const auto manifest = store.read_manifest(*step);
  if (!manifest && manifest.error().code == ENOENT) return std::unexpected(manifest.error());
  return std::vector{*step};
}

}  // namespace

int verify_checkpoints(const CheckpointArguments& arguments) {
  if (arguments.all_nodes) {
    return fail(arguments, "verify",
                make_error(ErrorKind::unsupported,
                           "--all-nodes requires the Python package: run the trunkline "
                           "command that it installs"));
  }
  const auto store = open_store(arguments);
  if (!store) return fail(arguments, "verify", store.error());
  const auto steps = steps_to_verify(**store, arguments);
  if (!steps) return fail(arguments, "verify", steps.error());
  const auto engine = Engine::create();
  if (!engine) return fail(arguments, "verify", engine.error());

  Json document = document_of("verify", arguments);
  document["ok"] = true;
  document["checkpoints"] = Json::array();
  bool ok = true;
  for (const std::uint64_t step : *steps) {
    auto verdict = verify_step(*engine, **store, step, arguments.all);
    if (!verdict) return fail(arguments, "verify", verdict.error());
    ok = ok && verdict->ok;
    document["checkpoints"].push_back(std::move(verdict->json));
    if (!arguments.json) std::cout << verdict->text << std::flush;
  }
  document["ok"] = ok;
  return print(arguments, document, "", ok);
}

}  // namespace trunkline::cli
