#include "cli/package_commands.h"

#include <algorithm>

#include "cli/usage_errors.h"

namespace trunkline::cli {

void add_package_command(CLI::App& app, CLI::App& group, std::function<int()>& chosen,
                         const PackageCommand& command) {
  CLI::App* const sub = group.add_subcommand(command.name, command.description);
  sub->group(std::string(kPackageGroup));
  sub->set_help_flag();   // --help is for the package, too
  sub->prefix_command();  // as are all other arguments
  sub->callback([&app, &chosen, sub] {
    chosen = [&app, sub] {
      const auto rest = sub->remaining();
      return report_missing_package(app, std::ranges::find(rest, "--json") != rest.end());
    };
  });
}

}  // namespace trunkline::cli
