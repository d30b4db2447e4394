// The command line: selects the command and turns its result into an exit status.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <span>
#include <string_view>
#include <tuple>

#include "cli/bench/bench_command.h"
#include "cli/checkpoint/checkpoint_command.h"
#include "cli/completion/completion_command.h"
#include "cli/doctor/doctor_command.h"
#include "cli/exit_code.h"
#include "cli/help_formatter.h"
#include "cli/interrupt.h"
#include "cli/package_commands.h"
#include "cli/tune/tune_command.h"
#include "cli/usage_errors.h"
#include "os/trace_file.h"

namespace trunkline::cli {
namespace {

// Opens standard streams that are closed (cron, `>&-`): otherwise files that are opened later would get their
// numbers, and receive what is printed.
void open_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) < 0) std::ignore = ::open("/dev/null", O_RDWR);  // gets the lowest number: fd
  }
}

int run(int argc, char** argv) {
  CLI::App app("Tensors between NVMe and memory at the speed of the hardware", "trunkline");
  app.formatter(std::make_shared<HelpFormatter>());  // also of all subcommands
  app.set_version_flag("--version", TRUNKLINE_VERSION, "Print the version and exit");
  app.require_subcommand(1);
  std::function<int()> chosen;
  add_doctor(app, chosen);
  add_bench(app, chosen);
  add_tune(app, chosen);
  add_checkpoint(app, chosen);
  add_completion(app, chosen);
  for (const PackageCommand& each : kPackageCommands) add_package_command(app, app, chosen, each);
  const std::span arguments(argv, static_cast<std::size_t>(argc));
  // Whether or not parsing gets as far as the option.
  const bool wants_json =
      std::ranges::any_of(arguments, [](std::string_view each) { return each == "--json"; });
  try {
    app.parse(argc, argv);
    return chosen();
  } catch (const CLI::ParseError& error) {
    return report_usage(app, error, wants_json);
  } catch (const std::exception& error) {
    return report_exception(app, error, wants_json);
  }
}

}  // namespace
}  // namespace trunkline::cli

int main(int argc, char** argv) {
  using namespace trunkline::cli;
  open_standard_streams();
  catch_interrupts();
  int status = kExitFailed;
  try {
    status = run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "trunkline: " << error.what() << '\n';
  }
  trunkline::os::finish_trace_from_environment();  // no exit handler runs when a signal ends the process
  end_by_caught_signal();
  return status;
}
