// The command line: finds the command and turns what it returns into an exit status.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <exception>
#include <functional>
#include <iostream>

#include "cli/bench/bench_command.h"
#include "cli/checkpoint/checkpoint_command.h"
#include "cli/doctor/doctor_command.h"
#include "cli/exit_code.h"
#include "cli/interrupt.h"

int main(int argc, char** argv) {
  using namespace trunkline::cli;
  catch_interrupts();
  int status = kExitFailed;
  try {
    CLI::App app("Tensors between NVMe and memory at the speed of the hardware", "trunkline");
    app.set_version_flag("--version", TRUNKLINE_VERSION);
    app.require_subcommand(1);
    app.footer("With the Python package also: pack, plan (models larger than memory; trunkline pack --help)");
    std::function<int()> chosen;
    add_doctor(app, chosen);
    add_bench(app, chosen);
    add_checkpoint(app, chosen);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return app.exit(error) == 0 ? kExitOk : kExitUsage;
    }
    status = chosen();
  } catch (const std::exception& error) {
    std::cerr << "trunkline: " << error.what() << '\n';
  }
  end_by_caught_signal();
  return status;
}
