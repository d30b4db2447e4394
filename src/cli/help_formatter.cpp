#include "cli/help_formatter.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <utility>

namespace trunkline::cli {
namespace {

constexpr std::size_t kNameColumn = 30;
constexpr std::size_t kLeastWidth = 60;
constexpr std::size_t kMostWidth = 100;

// Of COLUMNS, or of the terminal, or 80; between the limits.
std::size_t help_width() {
  std::size_t width = 0;
  const char* const columns = std::getenv("COLUMNS");  // NOLINT(concurrency-mt-unsafe)
  if (columns != nullptr) std::from_chars(columns, columns + std::string_view(columns).size(), width);
  winsize window{};
  if (width == 0 && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0) width = window.ws_col;
  return std::clamp(width == 0 ? 80 : width, kLeastWidth, kMostWidth);
}

// "--block-bytes, --block SIZE", or "PATH ..."
std::string name_of(const CLI::Option& option, bool is_positional) {
  std::string name;
  for (const char c : option.get_name(is_positional, !is_positional))
    name += c == ',' ? std::string(", ") : std::string(1, c);
  if (option.get_type_size() == 0) return name;
  if (!option.get_type_name().empty()) name += " " + option.get_type_name();
  if (option.get_expected_max() == CLI::detail::expected_max_vector_size) name += " ...";
  return name;
}

std::string description_of(const CLI::Option& option) {
  std::string text = option.get_description();
  std::string excluded;
  for (const CLI::Option* each : option.get_excludes())
    excluded += (excluded.empty() ? "" : ", ") + each->get_name();
  if (!excluded.empty()) text += fmt::format(" (not with {})", excluded);
  if (!option.get_default_str().empty()) text += fmt::format(" (default: {})", option.get_default_str());
  return text;
}

}  // namespace

std::string wrapped(std::string_view text, std::size_t width, std::size_t indent) {
  std::string lines;
  std::size_t used = 0;  // of the line
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (word.empty()) continue;
    if (used > 0 && used + 1 + word.size() > width) {
      lines += "\n" + std::string(indent, ' ');
      used = 0;
    }
    if (used > 0) lines += ' ';
    lines += word;
    used += (used > 0 ? 1 : 0) + word.size();
  }
  return lines;
}

std::string help_entry(std::string_view name, std::string_view text, std::size_t width) {
  std::string entry = fmt::format("  {}", name);
  if (text.empty()) return entry + "\n";
  if (entry.size() + 2 > kNameColumn)
    entry += "\n" + std::string(kNameColumn, ' ');
  else
    entry.resize(kNameColumn, ' ');
  return entry + wrapped(text, width - kNameColumn, kNameColumn) + "\n";
}

std::string HelpFormatter::make_description(const CLI::App* app) const {
  return wrapped(app->get_description() + ".", help_width(), 0) + "\n\n";
}

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  return help_entry(name_of(*option, is_positional), description_of(*option), help_width());
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
  return help_entry(command->get_name(), command->get_description(), help_width());
}

std::string HelpFormatter::make_footer(const CLI::App* app) const {
  const std::string footer = app->get_footer();
  return footer.empty() ? "" : wrapped(footer, help_width(), 0) + "\n";
}

std::string HelpFormatter::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const {
  std::string text = Formatter::make_help(app, std::move(name), mode);
  text.erase(text.find_last_not_of('\n') + 1);
  return text + "\n";
}

}  // namespace trunkline::cli
