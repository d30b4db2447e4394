#include "cli/help_formatter.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace trunkline::cli {
namespace {

TEST(HelpFormatter, WrapsAtSpaces) {
  EXPECT_EQ(wrapped("one two  three", 7, 2), "one two\n  three");
  EXPECT_EQ(wrapped("one two", 6, 0), "one\ntwo");
  EXPECT_EQ(wrapped("longerthanthat to", 5, 1), "longerthanthat\n to");
  EXPECT_EQ(wrapped("", 5, 1), "");
}

TEST(HelpFormatter, GivesLongNamesTheirOwnLine) {
  const std::string column(30, ' ');
  EXPECT_EQ(help_entry("--all", "Verify all", 80), "  --all" + std::string(23, ' ') + "Verify all\n");
  const std::string fits(26, 'x');
  EXPECT_EQ(help_entry(fits, "text", 80), "  " + fits + "  text\n");
  EXPECT_EQ(help_entry(fits + "x", "text", 80), "  " + fits + "x\n" + column + "text\n");
  EXPECT_EQ(help_entry("name", "one two", 34), "  name" + std::string(24, ' ') + "one\n" + column + "two\n");
}

TEST(HelpFormatter, LaysOutACommand) {
  CLI::App app("Move tensors", "trunkline");
  app.formatter(std::make_shared<HelpFormatter>());
  CLI::App* const bench = app.add_subcommand("bench", "Measure reading and writing of files");
  std::vector<std::string> paths;
  std::string size = "1GB";
  bool all = false;
  bench->add_option("PATH", paths, "Files")->type_name("");
  CLI::Option* const given = bench->add_option("--size,--bytes", size, "Size of each")->type_name("SIZE");
  given->capture_default_str();
  bench->add_flag("--all", all, "All of it")->excludes(given);
  EXPECT_EQ(app.help(),
            "Move tensors.\n\n"
            "Usage: trunkline [OPTIONS] [SUBCOMMAND]\n\n"
            "Options:\n"
            "  -h, --help                  Print this help message and exit\n\n"
            "Subcommands:\n"
            "  bench                       Measure reading and writing of files\n");
  EXPECT_EQ(bench->help(),
            "Measure reading and writing of files.\n\n"
            "Usage: bench [OPTIONS] [PATH...]\n\n"
            "Arguments:\n"
            "  PATH ...                    Files\n\n"
            "Options:\n"
            "  -h, --help                  Print this help message and exit\n"
            "  --size, --bytes SIZE        Size of each (not with --all) (default: 1GB)\n"
            "  --all                       All of it (not with --size)\n");
}

}  // namespace
}  // namespace trunkline::cli
