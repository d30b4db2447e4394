#include "cli/tune/tune_command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include "base/utc_time.h"
#include "cli/engine_json.h"
#include "cli/environment_json.h"
#include "cli/exit_code.h"
#include "cli/interrupt.h"
#include "cli/seconds.h"
#include "cli/tune/deepspeed_export.h"
#include "cli/tune/tune_display.h"
#include "cli/tune/tune_options.h"
#include "cli/tune/tune_run.h"
#include "os/machine_id.h"
#include "trunkline/units.h"
#include "tuning/tuning_store.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

// Options as given; those that are more than a number or a switch are not parsed yet.
struct Arguments {
  TuneOptions options;
  std::string budget = "60s", size = "1GB", exhaustive;
};

int report_failure(const Error& error, bool json) {
  if (json) {
    const Json document{{"command", "tune"}, {"schema", 1}, {"error", error_json(error)}};
    std::cout << document.dump(2) << '\n' << std::flush;
  }
  std::cerr << "trunkline tune: " << error.message << '\n';
  const bool usage =
      error.kind == ErrorKind::invalid_argument || error.code == ENOENT || error.code == ENOTDIR;
  return usage ? kExitUsage : kExitFailed;
}

Result<TuneOptions> interpret(const Arguments& arguments) {
  TuneOptions options = arguments.options;
  const auto budget = parse_seconds("--budget", arguments.budget);
  if (!budget) return std::unexpected(budget.error());
  options.budget_s = *budget;
  const auto size = parse_bytes(arguments.size);
  if (!size)
    return std::unexpected(make_error(ErrorKind::invalid_argument, "--size: " + size.error().message));
  options.size_bytes = *size;
  if (!arguments.exhaustive.empty()) {
    const auto each = parse_seconds("--exhaustive", arguments.exhaustive);
    if (!each) return std::unexpected(each.error());
    options.exhaustive_s = *each;
  }
  if (auto status = check(options); !status) return std::unexpected(status.error());
  return options;
}

// Where tunings are kept; an error where no variable of the environment says.
Result<std::string> tuning_file() {
  if (auto file = tuning::default_file()) return *file;
  return std::unexpected(
      make_error(ErrorKind::system,
                 "there is no file for saved settings: neither XDG_CONFIG_HOME nor HOME is "
                 "set; set one, or TRUNKLINE_TUNING to the path of a file"));
}

// Absolute, so that they mean the same from every directory.
std::vector<std::string> absolute(const std::vector<std::string>& paths) {
  std::vector<std::string> result;
  for (const std::string& path : paths) {
    std::error_code code;
    const auto full = std::filesystem::canonical(path, code);
    result.push_back(code ? path : full.string());
  }
  return result;
}

int forget(const TuneOptions& options) {
  const auto file = tuning_file();
  if (!file) return report_failure(file.error(), options.json);
  std::size_t count = 0;
  bool renamed = false;
  if (options.paths.empty()) {
    const auto loaded = tuning::load(*file);
    const auto removed = tuning::forget_all(*file);
    if (!removed) return report_failure(removed.error(), options.json);
    count = loaded ? loaded->size() : 0;
    renamed = !loaded;
  } else {
    const auto removed = tuning::forget(*file, absolute(options.paths));
    if (!removed) return report_failure(removed.error(), options.json);
    count = *removed;
  }
  if (options.json) {
    const Json document{{"command", "tune"}, {"schema", 1}, {"forgotten", count}, {"file", *file}};
    std::cout << document.dump(2) << '\n';
  } else if (renamed) {
    std::cout << fmt::format("{} holds no settings that can be read; it was renamed, with .damaged added\n",
                             *file);
  } else if (count == 0) {
    std::cout << fmt::format("no settings {}are saved in {}\n",
                             options.paths.empty() ? "" : "of these paths ", *file);
  } else {
    std::cout << fmt::format("removed the saved settings of {} path{} from {}\n", count,
                             count == 1 ? "" : "s", *file);
  }
  return std::cout.flush() ? kExitOk : kExitFailed;
}

tuning::Tuning tuning_of(const TuneOptions& options, const TuneResult& result) {
  tuning::Tuning tuning{.machine = os::machine_id(),
                        .time = utc_time(std::time(nullptr)),
                        .paths = absolute(options.paths),
                        .storages = result.storages,
                        .settings = settings_of(result.best(), result.candidates.front()),
                        .rates = {}};
  for (std::size_t pattern = 0; pattern < tuning::kPatterns; ++pattern) {
    tuning.rates.push_back({.defaults = static_cast<std::uint64_t>(result.halving.defaults.at(pattern)),
                            .tuned = static_cast<std::uint64_t>(result.halving.rates.at(pattern))});
  }
  return tuning;
}

Json to_json(const Candidate& candidate) {
  return {{"backend", to_string(candidate.backend)},
          {"lanes", candidate.lanes},
          {"queue_depth", candidate.queue_depth},
          {"block_bytes", candidate.block_bytes},
          {"direct", candidate.direct}};
}

Json to_json(const PatternRates& rates) {
  Json json = Json::object();
  for (std::size_t pattern = 0; pattern < rates.size(); ++pattern)
    json[std::string(tuning::pattern_name(pattern))] = std::round(rates.at(pattern));
  return json;
}

Json to_json(const TuneOptions& options, const TuneResult& result, const std::optional<std::string>& file) {
  Json document = provenance_json(os::read_environment());
  const HalvingResult& halving = result.halving;
  Json storages = Json::array();
  for (const tuning::Storage& each : result.storages)
    storages.push_back({{"filesystem", each.filesystem}, {"device", each.device}, {"id", each.id}});
  Json measured = Json::array();
  for (const Standing& each : halving.standings) {
    measured.push_back({{"settings", to_json(result.candidates[each.candidate])},
                        {"round", each.round},
                        {"seconds", each.seconds},
                        {"gain", each.gain},
                        {"bytes_per_second", to_json(each.rates)}});
  }
  document.update(Json{
      {"command", "tune"},
      {"schema", 1},
      {"paths", options.paths},
      {"storages", storages},
      {"file_bytes", result.file_bytes},
      {"budget_s", options.budget_s},
      {"seconds", result.seconds},
      {"noise", halving.noise},
      {"why", halving.why},
      {"defaults",
       {{"settings", to_json(result.candidates.front())}, {"bytes_per_second", to_json(halving.defaults)}}},
      {"best",
       {{"settings", to_json(result.best())},
        {"bytes_per_second", to_json(halving.rates)},
        {"is_default", halving.best == 0},
        {"gain", halving.gain}}},
      {"candidates", result.candidates.size()},
      {"measured", measured},
      {"stored", file ? Json(*file) : Json()}});
  return document;
}

std::string to_text(const TuneResult& result, const std::optional<std::string>& file) {
  const HalvingResult& halving = result.halving;
  std::string text = fmt::format("{}\n", rates_table(halving.defaults, halving.rates));
  text += fmt::format("{} of {} candidates measured in {:.0f} s: {}; noise {:.1f} %\n",
                      halving.standings.size() + 1, result.candidates.size(), result.seconds, halving.why,
                      100 * halving.noise);
  if (halving.best == 0) {
    text += fmt::format("no settings are faster than the defaults: {}\n", describe(result.best()));
  } else {
    text += fmt::format("{:.1f} % faster than the defaults: {}\n", 100 * (halving.gain - 1),
                        describe(result.best()));
  }
  if (file)
    text += fmt::format(
        "saved in {}; engines use these settings from now on. Undo with: trunkline tune --forget PATH\n",
        *file);
  return text;
}

int tune(const TuneOptions& options) {
  const bool compares_only = options.exhaustive_s > 0;
  std::optional<std::string> file;
  Status ready;
  if (!compares_only) {
    auto found = tuning_file();
    if (!found) return report_failure(found.error(), options.json);
    file = std::move(*found);
    ready = tuning::check_storable(*file);
  }
  if (ready && !options.export_file.empty()) ready = check_export(options.export_file, options.merge);
  if (!ready) return report_failure(ready.error(), options.json);
  const auto result = run_tune(options, std::cerr, ::isatty(STDERR_FILENO) == 1);
  if (!result) return report_failure(result.error(), options.json);
  if (interrupted()) return report_failure(make_error(ErrorKind::cancelled, "interrupted"), options.json);
  if (file) {
    if (auto stored = tuning::store(*file, tuning_of(options, *result)); !stored)
      return report_failure(stored.error(), options.json);
  }
  if (!options.export_file.empty()) {
    if (auto written = export_deepspeed(options.export_file, options.merge, result->best()); !written)
      return report_failure(written.error(), options.json);
  }
  std::cout << (options.json
                    ? to_json(options, *result, file).dump(2, ' ', false, Json::error_handler_t::replace) +
                          "\n"
                    : to_text(*result, file));
  if (!options.export_file.empty() && !options.json)
    std::cout << fmt::format("wrote the aio section of {}\n", options.export_file);
  return std::cout.flush() ? kExitOk : kExitFailed;
}

int run(const Arguments& arguments) {
  const auto options = interpret(arguments);
  if (!options) return report_failure(options.error(), arguments.options.json);
  return options->forget ? forget(*options) : tune(*options);
}

}  // namespace

void add_tune(CLI::App& app, std::function<int()>& chosen) {
  CLI::App* const command = app.add_subcommand(
      "tune",
      "Measure which settings are fastest for files in a directory, and save them for engines to use");
  const auto arguments = std::make_shared<Arguments>();
  TuneOptions& options = arguments->options;
  command
      ->add_option("PATH", options.paths,
                   "Directory on the disk to measure; several: the directories of a volume, together")
      ->type_name("");
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command
      ->add_option("--budget", arguments->budget,
                   "Time for the whole measurement, such as 90, 60s, 2min or 1h")
      ->type_name("TIME")
      ->capture_default_str();
  command
      ->add_option(
          "--size", arguments->size,
          "Largest scratch file to write in each PATH, at least 64MiB; half of the free space is left free")
      ->type_name("SIZE")
      ->capture_default_str();
  command
      ->add_option("--export", options.export_file,
                   "Also write the settings to a new file, as the aio section of a DeepSpeed configuration")
      ->type_name("FILE");
  command->add_flag("--merge", options.merge,
                    "With --export: replace the aio section of an existing configuration");
  command->add_flag(
      "--forget", options.forget,
      "Measure nothing; remove the saved settings of these PATHs, or without PATH all saved settings");
  command
      ->add_option("--exhaustive", arguments->exhaustive,
                   "Measure each pattern of every candidate for this time, whatever the budget, and save "
                   "nothing")
      ->type_name("TIME");
  command->add_flag("--json", options.json, "Print one JSON document");
  command->callback([arguments, &chosen] { chosen = [arguments] { return run(*arguments); }; });
}

}  // namespace trunkline::cli
