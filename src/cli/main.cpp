// The command line: selects the command and turns its result into an exit status.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <exception>
#include <functional>
#include <iostream>
#include <string>
#include <tuple>
#include <vector>

#include "cli/bench/bench_command.h"
#include "cli/checkpoint/checkpoint_command.h"
#include "cli/doctor/doctor_command.h"
#include "cli/exit_code.h"
#include "cli/interrupt.h"
#include "os/trace_file.h"

namespace {

// CLI11 reports that a subcommand is required even where an unknown one was given.
void name_unknown_subcommand(const CLI::App& app) {
  const CLI::App* group = &app;
  while (!group->get_subcommands().empty()) group = group->get_subcommands().front();
  const std::vector<std::string> left = group->remaining();
  std::string known;
  for (const CLI::App* each : group->get_subcommands([](const CLI::App*) { return true; }))
    known += (known.empty() ? "" : ", ") + each->get_name();
  if (left.empty() || known.empty()) return;
  std::cerr << group->get_name() << ": unknown subcommand '" << left.front() << "'; there are " << known
            << '\n';
}

// Opens standard streams that are closed (cron, `>&-`): otherwise files that are opened later would get their
// numbers, and receive what is printed.
void open_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) < 0) std::ignore = ::open("/dev/null", O_RDWR);  // gets the lowest number: fd
  }
}

}  // namespace

int main(int argc, char** argv) {
  using namespace trunkline::cli;
  open_standard_streams();
  catch_interrupts();
  int status = kExitFailed;
  try {
    CLI::App app("Tensors between NVMe and memory at the speed of the hardware", "trunkline");
    app.set_version_flag("--version", TRUNKLINE_VERSION);
    app.require_subcommand(1);
    std::function<int()> chosen;
    add_doctor(app, chosen);
    add_bench(app, chosen);
    add_checkpoint(app, chosen);
    // After the subcommands, which would inherit it.
    app.footer("With the Python package also: pack, plan (models larger than memory; trunkline pack --help)");
    try {
      app.parse(argc, argv);
    } catch (const CLI::RequiredError& error) {
      name_unknown_subcommand(app);
      app.exit(error);
      return kExitUsage;
    } catch (const CLI::ParseError& error) {
      return app.exit(error) == 0 ? kExitOk : kExitUsage;
    }
    status = chosen();
  } catch (const std::exception& error) {
    std::cerr << "trunkline: " << error.what() << '\n';
  }
  trunkline::os::finish_trace_from_environment();  // no exit handler runs when a signal ends the process
  end_by_caught_signal();
  return status;
}
