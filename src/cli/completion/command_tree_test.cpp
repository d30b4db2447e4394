#include "cli/completion/command_tree.h"

#include <gtest/gtest.h>

namespace trunkline::cli {
namespace {

TEST(CommandTree, HasTheCommandsOptionsAndArgumentsOfAnApp) {
  CLI::App app("A program", "program");
  CLI::App* const command = app.add_subcommand("copy", "Copy a file");
  std::string from;
  bool quiet = false;
  command->add_option("FILE", from)->type_name("");
  command->add_option("--mode,--how", from, "How")->type_name("fast|safe");
  command->add_option("--hidden", from)->group("");
  command->add_flag("--quiet", quiet);
  const CommandInfo tree = describe_app(app);
  EXPECT_EQ(tree.name, "program");
  ASSERT_EQ(tree.commands.size(), 1U);
  const CommandInfo& copy = tree.commands.front();
  EXPECT_EQ(copy.description, "Copy a file");
  EXPECT_EQ(copy.arguments, std::vector<std::string>{"FILE"});
  ASSERT_EQ(copy.options.size(), 3U);  // with --help
  EXPECT_EQ(copy.options[1].names, (std::vector<std::string>{"--mode", "--how"}));
  EXPECT_EQ(copy.options[1].value, "fast|safe");
  EXPECT_EQ(copy.options[2].value, "");
}

TEST(CommandTree, TakesInTheCommandsOfThePackage) {
  CommandInfo tree{.name = "program", .commands = {{.name = "plan", .description = "as listed"}}};
  const auto package = nlohmann::json::parse(R"({"name": "program", "commands": [
      {"name": "plan", "options": [{"names": ["--batch"], "value": "N"}]}, {"name": "pack"}]})");
  ASSERT_TRUE(merge_commands(tree, package));
  ASSERT_EQ(tree.commands.size(), 2U);
  EXPECT_EQ(tree.commands[0].description, "as listed");
  EXPECT_EQ(tree.commands[0].options.front().value, "N");
  EXPECT_EQ(tree.commands[1].name, "pack");
  EXPECT_FALSE(merge_commands(tree, nlohmann::json::parse("[]")));
}

TEST(CommandTree, KnowsWhatCanBeOfferedForAValue) {
  EXPECT_EQ(words_of_value("auto|never"), (std::vector<std::string>{"auto", "never"}));
  EXPECT_EQ(words_of_value("cpu|cuda:N"), std::vector<std::string>{"cpu"});
  EXPECT_TRUE(words_of_value("FILE").empty());
  EXPECT_TRUE(words_of_value("").empty());
  EXPECT_TRUE(is_file_value("DIR"));
  EXPECT_TRUE(is_file_value("A.json"));
  EXPECT_FALSE(is_file_value("N"));
  EXPECT_FALSE(is_file_value("fio|gdsio"));
  EXPECT_TRUE(is_file_value("unet3d|NAME_OR_FILE"));  // words and files
  EXPECT_EQ(words_of_value("unet3d|NAME_OR_FILE"), std::vector<std::string>{"unet3d"});
}

}  // namespace
}  // namespace trunkline::cli
