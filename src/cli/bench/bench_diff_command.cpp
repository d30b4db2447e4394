#include "cli/bench/bench_diff_command.h"

#include <fmt/format.h>

#include <cerrno>
#include <fstream>
#include <iostream>
#include <memory>
#include <utility>

#include "cli/bench/bench_diff.h"
#include "cli/engine_json.h"
#include "cli/exit_code.h"
#include "cli/text_table.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

struct DiffArguments {
  std::string before, after, fail_over;
  bool json = false;
};

Result<Json> read_document(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::unexpected(system_error(errno, "open " + path, path));
  Json document = Json::parse(file, nullptr, false);
  if (file.bad()) return std::unexpected(system_error(errno, "read " + path, path));
  if (document.is_discarded())
    return std::unexpected(make_error(ErrorKind::format, path + " is not a JSON document", path));
  return document;
}

Result<BenchDifference> compare(const DiffArguments& arguments, std::optional<double>& fail_over) {
  if (!arguments.fail_over.empty()) {
    const auto parsed = parse_fail_over(arguments.fail_over);
    if (!parsed) return std::unexpected(parsed.error());
    fail_over = *parsed;
  }
  const auto before = read_document(arguments.before);
  if (!before) return std::unexpected(before.error());
  const auto after = read_document(arguments.after);
  if (!after) return std::unexpected(after.error());
  return compare_benches(*before, *after, fail_over);
}

Json difference_json(const DiffArguments& arguments, const BenchDifference& difference,
                     std::optional<double> fail_over) {
  Json changes = Json::array();
  for (const BenchChange& change : difference.changes) {
    changes.push_back({{"name", change.row},
                       {"metric", change.metric},
                       {"before", change.before},
                       {"after", change.after},
                       {"ratio", change.ratio},
                       {"judged", change.judged},
                       {"slower", change.slower}});
  }
  return {{"command", "bench diff"},
          {"schema", 1},
          {"before", arguments.before},
          {"after", arguments.after},
          {"fail_over", fail_over ? Json(*fail_over) : Json()},
          {"slower", difference.any_slower()},
          {"changes", changes},
          {"only_before", difference.only_before},
          {"only_after", difference.only_after},
          {"changed_options", difference.options}};
}

std::string shown(double value) {
  return fmt::format("{:.{}f}", value, value >= 1000 ? 0 : value >= 10 ? 1 : 3);
}

std::string difference_text(const DiffArguments& arguments, const BenchDifference& difference) {
  TextTable table({"", "metric", "before", "after", "ratio", "verdict"});
  for (const BenchChange& change : difference.changes) {
    table.add({change.row, change.metric, shown(change.before), shown(change.after),
               fmt::format("{:.3f}", change.ratio), change.slower ? "slower" : ""});
  }
  std::string text = table.render();
  for (const std::string& row : difference.only_before)
    text += fmt::format("\n{}: only in {}", row, arguments.before);
  for (const std::string& row : difference.only_after)
    text += fmt::format("\n{}: only in {}", row, arguments.after);
  for (const std::string& option : difference.options)
    text += fmt::format("\nmeasured with another option: {}", option);
  return text.ends_with('\n') ? text : text + "\n";
}

int run_diff(const DiffArguments& arguments) {
  std::optional<double> fail_over;
  const auto difference = compare(arguments, fail_over);
  if (!difference) {
    const Json document{{"command", "bench diff"}, {"schema", 1}, {"error", error_json(difference.error())}};
    if (arguments.json) std::cout << document.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
    std::cerr << "trunkline bench diff: " << difference.error().message << '\n';
    return kExitUsage;
  }
  if (arguments.json) {
    std::cout << difference_json(arguments, *difference, fail_over)
                     .dump(2, ' ', false, Json::error_handler_t::replace)
              << '\n';
  } else {
    std::cout << difference_text(arguments, *difference);
  }
  std::cout << std::flush;
  return std::cout && !difference->any_slower() ? kExitOk : kExitFailed;
}

}  // namespace

void add_bench_diff(CLI::App& bench, std::function<int()>& chosen) {
  CLI::App* const command = bench.add_subcommand(
      "diff", "Compare two results of bench --json, row by row; exits with 1 if one is slower");
  const auto arguments = std::make_shared<DiffArguments>();
  command->add_option("A", arguments->before, "A file that bench --json or --output wrote")
      ->type_name("")
      ->required();
  command->add_option("B", arguments->after, "Another one, compared with A")->type_name("")->required();
  command
      ->add_option("--fail-over", arguments->fail_over,
                   "Exit with 1 if GB/s of a row, also with fsync, fell by more than this, such as 5% "
                   "(default: never)")
      ->check([](const std::string& text) {
        return text.empty() ? std::string("it is empty; pass a percentage such as 5%") : std::string();
      })
      ->type_name("PERCENT");
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->callback([arguments, &chosen] { chosen = [arguments] { return run_diff(*arguments); }; });
}

}  // namespace trunkline::cli
