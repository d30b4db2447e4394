#include "cli/tune/deepspeed_export.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <set>

#include "support/temp_directory.h"
#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr Candidate kCandidate{BackendKind::libaio, 4, 32, kMiB, true};

Json read(const std::string& file) {
  std::ifstream stream(file);
  return Json::parse(std::string(std::istreambuf_iterator<char>(stream), {}));
}

TEST(DeepspeedExport, HasTheKeysAndTypesThatDeepspeedReads) {
  const Json section = deepspeed_aio(kCandidate);
  std::set<std::string> keys;
  for (const auto& [key, value] : section.items()) keys.insert(key);
  EXPECT_EQ(keys, (std::set<std::string>{"block_size", "intra_op_parallelism", "overlap_events",
                                         "queue_depth", "single_submit", "use_gds"}));
  EXPECT_TRUE(section["block_size"] == kMiB && section["block_size"].is_number_integer());
  EXPECT_TRUE(section["queue_depth"] == 32 && section["queue_depth"].is_number_integer());
  EXPECT_TRUE(section["intra_op_parallelism"] == 4 && section["intra_op_parallelism"].is_number_integer());
  for (const char* key : {"single_submit", "overlap_events", "use_gds"})
    EXPECT_TRUE(section[key].is_boolean()) << key;
}

TEST(DeepspeedExport, WritesANewFileAndOverwritesNone) {
  const test::TempDirectory directory;
  const std::string file = directory.file("deepspeed.json");
  EXPECT_TRUE(check_export(file, false));
  ASSERT_TRUE(export_deepspeed(file, false, kCandidate));
  EXPECT_EQ(read(file), (Json{{"aio", deepspeed_aio(kCandidate)}}));
  for (const Status& status : {check_export(file, false), export_deepspeed(file, false, kCandidate)}) {
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(status.error().message.find("--merge"), std::string::npos);
  }
}

TEST(DeepspeedExport, MergesIntoTheSectionAndChangesNothingElse) {
  const test::TempDirectory directory;
  const std::string file = directory.file("deepspeed.json");
  std::ofstream(file) << R"({"z": [1, 2.5], "aio": {"other": 7, "queue_depth": "auto"}, "a": {"b": null}})";
  EXPECT_TRUE(check_export(file, true));
  ASSERT_TRUE(export_deepspeed(file, true, kCandidate));
  const Json config = read(file);
  EXPECT_EQ(config["z"], (Json{1, 2.5}));
  EXPECT_EQ(config["a"]["b"], nullptr);
  EXPECT_EQ(config["aio"]["other"], 7);
  EXPECT_EQ(config["aio"]["queue_depth"], 32);
  EXPECT_EQ(config.begin().key(), "z");  // in their order
}

TEST(DeepspeedExport, LeavesTheRestAsItIsWritten) {
  const test::TempDirectory directory;
  const std::string file = directory.file("deepspeed.json");
  const auto merged = [&](const std::string& text) {
    std::ofstream(file) << text;
    EXPECT_TRUE(export_deepspeed(file, true, kCandidate)) << text;
    std::ifstream stream(file);
    std::string found(std::istreambuf_iterator<char>(stream), {});
    EXPECT_TRUE(Json::accept(found)) << found;
    EXPECT_EQ(read(file)["aio"]["queue_depth"], 32);
    return found;
  };
  const std::string numbers = "\"id\": 123456789012345678901234567890, \"lr\":0.100";
  EXPECT_TRUE(merged("{" + numbers + "}").starts_with("{" + numbers + ",\n  \"aio\": {\n"));
  EXPECT_TRUE(merged("{ \"aio\": {}, " + numbers + " }\n").ends_with("\n  }, " + numbers + " }\n"));
  const std::string within = merged("{\"aio\": {" + numbers + ", \"use_gds\": true}}");
  EXPECT_TRUE(within.contains("\"id\": 123456789012345678901234567890,\n")) << within;
  EXPECT_TRUE(within.contains("\"lr\": 0.100,\n")) << within;
  EXPECT_EQ(read(file)["aio"]["use_gds"], false);
  merged("{}");
  merged(" {\n}\n");
  merged("{\"a\": {}\n}");
  merged("{\"a}\": \"}\"}");
}

TEST(DeepspeedExport, RejectsWhatItCannotMerge) {
  const test::TempDirectory directory;
  const std::string file = directory.file("deepspeed.json");
  for (const char* text : {"", "[1]", "{\"aio\": 3}", "{\"a\": 1, \"a\": 2}", "{", "{\"\\u0061io\": {}}"}) {
    std::ofstream(file) << text;
    EXPECT_FALSE(check_export(file, true)) << text;
    EXPECT_FALSE(export_deepspeed(file, true, kCandidate)) << text;
    std::ifstream stream(file);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(stream), {}), text);
  }
  EXPECT_FALSE(check_export(directory.file("no/such/folder.json"), false));
}

}  // namespace
}  // namespace trunkline::cli
