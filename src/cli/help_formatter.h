// The layout of help texts; python/trunkline/_help.py lays out those of the commands in Python in the same
// way.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <string>
#include <string_view>

namespace trunkline::cli {

class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter() { label("Positionals", "Arguments"); }
  std::string make_description(const CLI::App* app) const override;
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  std::string make_footer(const CLI::App* app) const override;
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
};

// A name and what it means, in two columns of together `width` characters. A name that is too long for its
// column has a line of its own.
std::string help_entry(std::string_view name, std::string_view text, std::size_t width);

// The text in lines of at most `width` characters, broken at spaces, with `indent` spaces before all but the
// first.
std::string wrapped(std::string_view text, std::size_t width, std::size_t indent);

}  // namespace trunkline::cli
