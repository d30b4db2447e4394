#include "cli/bench/bench_command.h"

#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <memory>
#include <system_error>
#include <utility>

#include "base/creation_error.h"
#include "cli/bench/bench_diff_command.h"
#include "cli/bench/bench_json.h"
#include "cli/bench/bench_run.h"
#include "cli/bench/bench_table.h"
#include "cli/engine_json.h"
#include "cli/environment_json.h"
#include "cli/exit_code.h"
#include "cli/interrupt.h"
#include "cli/whole_number.h"
#include "trunkline/trace.h"

namespace trunkline::cli {
namespace {

// Options as given; those that are more than a number or a switch are not parsed yet.
struct Arguments {
  BenchOptions options;
  std::string size, block = "1MiB", backend = "auto", device = "cpu", memory = "aligned", direct = "auto";
  std::string duration;
  std::string write_modes = "fresh,preallocated,overwrite", compare, report;
};

template <class Value, class Target>
bool take(Result<Value> parsed, Target& target, Status& status) {
  if (parsed) target = std::move(*parsed);
  if (!parsed && status) status = std::unexpected(parsed.error());
  return parsed.has_value();
}

// What gdsio has no counterpart for, or a different one.
Status check_gdsio(const BenchOptions& options) {
  const auto lacks = [](std::string_view what) {
    return std::unexpected(make_error(ErrorKind::invalid_argument,
                                      fmt::format("--compare gdsio: gdsio {}; use --compare fio", what)));
  };
  if (options.mix) return lacks("does not mix reads and writes as --mix does");
  if (options.least_block_bytes) return lacks("does not choose block sizes from a range at random");
  if (options.direct == Direct::never) return lacks("always uses O_DIRECT");
  if (options.paths.size() > 1 || options.files > 1) return lacks("is compared on one file only");
  return {};
}

Result<BenchOptions> interpret(const Arguments& arguments) {
  BenchOptions options = arguments.options;
  Status status;
  if (!arguments.report.empty()) {
    return std::unexpected(
        make_error(ErrorKind::unsupported,
                   "--report needs the Python package with matplotlib; run the trunkline command that the "
                   "package installs"));
  }
  std::uint64_t size_bytes = 0;
  if (!arguments.size.empty() && take(parse_size_bytes(arguments.size), size_bytes, status)) {
    options.size_bytes = size_bytes;
  }
  BlockRange blocks;
  if (take(parse_block_range(arguments.block), blocks, status)) {
    options.block_bytes = blocks.most_bytes;
    if (blocks.least_bytes < blocks.most_bytes) options.least_block_bytes = blocks.least_bytes;
  }
  take(parse_bench_backend(arguments.backend), options.backend, status);
  if (!arguments.duration.empty()) take(parse_duration(arguments.duration), options.duration_s, status);
  take(parse_memory(arguments.memory), options.memory, status);
  take(parse_direct(arguments.direct), options.direct, status);
  take(parse_write_modes(arguments.write_modes), options.write_modes, status);
  take(parse_device(arguments.device), options.cuda, status);
  Peers peers;
  if (!arguments.compare.empty()) take(parse_peers(arguments.compare), peers, status);
  options.compare_fio = peers.fio;
  options.compare_gdsio = peers.gdsio;
  if (status && peers.gdsio) status = check_gdsio(options);
  if (!status) return std::unexpected(status.error());
  return options;
}

// Decides what the options leave open, by what the paths are.
Result<BenchFiles> settle(BenchOptions& options) {
  const bool is_selected = options.read || options.writes();
  auto files = BenchFiles::find(options);
  if (!files) return files;
  if (!is_selected) options.read = options.write = true;
  if (!is_selected && files->existing()) options.write = false;
  const std::uint64_t first = files->all().front().bytes;
  const bool equal =
      std::ranges::all_of(files->all(), [&](const BenchFile& file) { return file.bytes == first; });
  const bool compares = options.compare_fio || options.compare_gdsio;
  if (compares && (!equal || first < options.block_bytes)) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument,
                   "--compare requires files of one size, of at least one block; pass --size"));
  }
  return files;
}

int report_failure(const Error& error, const BenchOptions& options, bool usage) {
  nlohmann::ordered_json document{{"command", "bench"}, {"schema", 1}, {"error", error_json(error)}};
  if (options.json) std::cout << document.dump(2) << '\n' << std::flush;
  if (!options.output.empty() && !usage) std::ofstream(options.output) << document.dump(2) << "\n";
  std::cerr << "trunkline bench: " << error.message << '\n';
  return usage ? kExitUsage : kExitFailed;
}

bool is_usage(const Error& error) { return error.kind == ErrorKind::invalid_argument; }

int present(const BenchOptions& options, BenchResults& results) {
  auto document = provenance_json(os::read_environment());
  document.update(bench_json(options, results));
  if (!options.output.empty()) {
    std::ofstream file(options.output);
    file << document.dump(2) << "\n";
    file.flush();
    if (!file) {
      // As for wrong usage, it is not written to the output, too.
      report_failure(system_error(errno, "write the results to " + options.output, options.output), options,
                     true);
      return kExitFailed;
    }
  }
  std::cout << (options.json ? document.dump(2) + "\n" : bench_table(document)) << std::flush;
  return std::cout ? kExitOk : kExitFailed;
}

// Whether opening the path would wait until another process reads: not so for pipes of a shell (/dev/fd/63),
// which exist with their readers.
bool is_named_fifo(const std::string& path) {
  struct stat info{};
  struct statfs filesystem{};
  return ::stat(path.c_str(), &info) == 0 && S_ISFIFO(info.st_mode) &&
         ::statfs(path.c_str(), &filesystem) == 0 && filesystem.f_type != PIPEFS_MAGIC;
}

// Whether results, a trace or a log would replace a file that is measured, or could not be opened at once.
Status check_outputs(const BenchOptions& options) {
  for (const auto& [option, output] :
       {std::pair("--output", options.output), {"--trace", options.trace}, {"--log", options.log}}) {
    if (!output.empty() && is_named_fifo(output)) {
      return std::unexpected(make_error(
          ErrorKind::invalid_argument,
          fmt::format("{} {} is a FIFO, and opening it would wait for a reader; name a file, or a pipe of "
                      "the shell, as in {} >(gzip > FILE.gz)",
                      option, output, option),
          output));
    }
    for (const std::string& path : options.paths) {
      std::error_code ignored;
      if (output.empty() || !std::filesystem::equivalent(output, path, ignored)) continue;
      return std::unexpected(make_error(
          ErrorKind::invalid_argument,
          fmt::format("{} {} is the file to be measured; name another file", option, output), output));
    }
  }
  return {};
}

Result<BenchExtras> prepare_extras(const BenchOptions& options) {
  BenchExtras extras;
  Status status;
  if (options.compare_fio) take(FioPeer::find(), extras.fio, status);
  if (options.compare_gdsio) take(GdsioPeer::find(), extras.gdsio, status);
  if (status && !options.log.empty()) take(LatencyFile::create(options.log), extras.log, status);
  if (!status) return std::unexpected(status.error());
  return extras;
}

Result<BenchResults> measure(const BenchOptions& options, const Engine& engine, BenchFiles& files,
                             BenchExtras& extras) {
  Progress progress(std::cerr, ::isatty(STDERR_FILENO) == 1);
  auto results = BenchRun(options, engine, files, progress, extras).run();
  // Also of what failed or was interrupted: it may show why.
  const Result<TraceSummary> traced = options.trace.empty() ? TraceSummary{} : stop_trace();
  if (!results) return results;
  if (!traced) return std::unexpected(traced.error());
  if (options.keep) {
    files.keep();
    for (const BenchFile& file : files.all()) progress.note("kept " + file.path);
  }
  return results;
}

int run(const Arguments& arguments) {
  auto interpreted = interpret(arguments);
  if (!interpreted) return report_failure(interpreted.error(), arguments.options, true);
  BenchOptions& options = *interpreted;
  if (auto outputs = check_outputs(options); !outputs) return report_failure(outputs.error(), options, true);
  auto files = settle(options);
  if (!files) return report_failure(files.error(), options, true);
  if (!options.output.empty() && !std::ofstream(options.output, std::ios::app)) {
    const std::string directory = std::filesystem::path(options.output).parent_path().string();
    return report_failure(creation_error(errno, "open --output " + options.output, options.output, directory),
                          options, true);
  }
  auto extras = prepare_extras(options);
  if (!extras) return report_failure(extras.error(), options, true);
  auto engine = Engine::create({.backend = options.backend,
                                .lanes = options.lanes,
                                .queue_depth = options.queue_depth,
                                .block_bytes = options.block_bytes,
                                .pinned_budget_bytes = {},
                                .paths = options.paths,
                                .faults = {}});
  if (!engine) return report_failure(engine.error(), options, is_usage(engine.error()));
  if (!options.trace.empty()) {
    if (auto started = start_trace(options.trace); !started)
      return report_failure(started.error(), options, true);
  }
  auto results = measure(options, *engine, *files, *extras);
  if (!results) return report_failure(results.error(), options, false);
  return present(options, *results);
}

void add_options(CLI::App& command, Arguments& arguments) {
  BenchOptions& options = arguments.options;
  command
      .add_option("PATH", options.paths,
                  "Directories to create files in, or existing files, which are only read")
      ->type_name("");
  // So that a script can append options to a command line that already sets them.
  command.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command.add_flag("--read", options.read,
                   "Measure reading (default: both; of existing files, reading only)");
  command.add_flag("--write", options.write, "Measure writing");
  command
      .add_option("--size", arguments.size, "Size of each file, rounded up to whole blocks (default: 1GB)")
      ->type_name("SIZE");
  command
      .add_option("--mix", options.mix,
                  "Measure reads and writes together: N% of the transfers read, the others overwrite")
      ->check(whole_number(0, 100))
      ->type_name("N");
  command
      .add_option(
          "--block-bytes,--block", arguments.block,
          "Size of a transfer, a multiple of 4096, or a range such as 4KiB-64KiB, from which the size of "
          "each transfer is chosen at random")
      ->type_name("SIZE")
      ->capture_default_str();
  command
      .add_option("--queue-depth", options.queue_depth,
                  "Transfers in flight per lane, from 1 to 4096 (default: the engine's)")
      ->check(whole_number(1, 4096))
      ->type_name("N");
  command.add_option("--lanes", options.lanes, "I/O threads, from 1 to 64 (default: the engine's)")
      ->check(whole_number(1, 64))
      ->type_name("N");
  command.add_option("--backend,--engine", arguments.backend, "How commands are handed to the kernel")
      ->type_name("auto|io_uring|libaio|threads")
      ->capture_default_str();
  command
      .add_option("--device", arguments.device, "Memory to read into and write from: the host's or a GPU's")
      ->type_name("cpu|cuda:N")
      ->capture_default_str();
  command
      .add_option("--duration", arguments.duration,
                  "Time for each measurement of reading and overwriting, such as 30s or 2min (default: "
                  "one pass over the files)")
      ->type_name("TIME");
  command.add_flag("--random", options.random, "Blocks in random order, none twice in a pass");
  command
      .add_option("--seed", options.seed,
                  "Repeat the same random order, sizes and mix as other runs with this number")
      ->check(whole_number(0, std::numeric_limits<std::uint32_t>::max()))
      ->type_name("N");
  command.add_option("--files", options.files, "Files in each directory")
      ->check(whole_number(1, 10'000))
      ->type_name("N")
      ->capture_default_str();
  command.add_flag("--verify", options.verify,
                   "Compare every byte that was read or written, outside the timed part");
  command.add_option("--repeat", options.repeat, "Measurements of each kind; medians are reported")
      ->check(whole_number(1, 1000))
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option(
          "--memory", arguments.memory,
          "Alignment of the memory: ordinary is 64 bytes past a page boundary, like torch CPU tensors")
      ->type_name("aligned|ordinary")
      ->capture_default_str();
  command.add_option("--direct", arguments.direct, "Whether to bypass the page cache (O_DIRECT)")
      ->type_name("auto|always|never")
      ->capture_default_str();
  command
      .add_option("--write-mode", arguments.write_modes,
                  "What is written to, any of: fresh (new files), preallocated (reserved blocks), overwrite "
                  "(blocks with data)")
      ->type_name("MODES")
      ->capture_default_str();
  command
      .add_option("--compare", arguments.compare,
                  "Also run these programs on the same files with the same parameters; gdsio: on one file")
      ->type_name("fio|gdsio|fio,gdsio");
  command
      .add_option(
          "--log", options.log,
          "Write the latency of every transfer to this file, as CSV, and compute the percentiles from them")
      ->type_name("FILE");
  command
      .add_option("--trace", options.trace,
                  "Record a trace for ui.perfetto.dev: of each thread, the last 65536 events")
      ->type_name("FILE");
  command.add_option("--output", options.output, "Write the JSON document to this file too")
      ->type_name("FILE");
  command
      .add_option("--report", arguments.report,
                  "Draw the results as a page of HTML (needs the Python package and matplotlib)")
      ->type_name("FILE");
  command.add_flag("--json", options.json, "Print one JSON document");
  command.add_flag("--keep", options.keep, "Keep the files; those created for reading can be verified later");
}

}  // namespace

void add_bench(CLI::App& app, std::function<int()>& chosen) {
  CLI::App* const command = app.add_subcommand("bench", "Measure reading and writing of files");
  const auto arguments = std::make_shared<Arguments>();
  add_options(*command, *arguments);
  add_bench_diff(*command, chosen);
  command->callback([command, arguments, &chosen] {
    const bool measures = command->get_subcommands().empty();
    if (measures && arguments->options.paths.empty()) throw CLI::RequiredError("PATH");
    if (!measures && !arguments->options.paths.empty())
      throw CLI::ValidationError("PATH", "diff compares results; for a directory of that name write ./diff");
    if (measures) chosen = [arguments] { return run(*arguments); };
  });
}

}  // namespace trunkline::cli
