#include "checkpoint/manifest.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace trunkline::checkpoint {
namespace {

Manifest sample() {
  return {.step = 12,
          .commit = 4,
          .time = "2026-01-31T23:59:59Z",
          .chunk_bytes = kChunkBytes,
          .world_size = 2,
          .volumes = {".", "/fast/run-0011"},
          .shards = {{.volume = 0, .file = "shard-a.safetensors", .bytes = 3000, .crc32c = {0x0102aaff}},
                     {.volume = 1,
                      .file = "shard-b.safetensors",
                      .bytes = kChunkBytes + 1,
                      .crc32c = {0xffffffff, 0}}},
          .tensors = {{.name = "model.weight",
                       .dtype = "BF16",
                       .shape = {40, 25},
                       .pieces = {{.shard = 0, .offset = 1000, .bytes = 1500},
                                  {.shard = 1, .offset = 64, .bytes = 500}}},
                      {.name = "", .dtype = "F32", .shape = {0, 5}, .pieces = {}},
                      {.name = "µ", .dtype = "torch.complex128", .shape = {}, .pieces = {{1, 0, 16}}}},
          .state = R"({"z":1,"a":[123456789012345678901234567890,1.5,null],"epoch":{"$t":"model.weight"}})"};
}

std::string json_of(const Manifest& manifest) {
  const auto json = manifest_to_json(manifest);
  EXPECT_TRUE(json) << json.error().message;
  return json.value_or("");
}

// The sample's JSON with `from` replaced by `to`.
std::string with(std::string_view from, std::string_view to) {
  std::string text = json_of(sample());
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Manifest, IsReadBackAsWritten) {
  Manifest small;
  small.commit = 1;
  small.time = "1969-12-31T23:59:50Z";
  Manifest large = sample();
  large.step = large.commit = kMaxNumber;
  large.chunk_bytes = kMinChunkBytes;
  large.shards = {{.volume = 1, .file = std::string(255, 'f'), .bytes = 40'960'001, .crc32c = {}}};
  for (std::uint32_t i = 0; i < 10'001; ++i) large.shards[0].crc32c.push_back(i * 2'654'435'761U);
  large.tensors.clear();
  for (const Manifest& manifest : {small, sample(), large}) {
    const auto text = format_manifest(manifest);
    ASSERT_TRUE(text) << text.error().message;
    const auto parsed = parse_manifest(*text, "m");
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(*parsed, manifest);
  }
}

TEST(Manifest, StateKeepsItsNumbersAndTheOrderOfItsKeys) {
  EXPECT_EQ(manifest_from_json(json_of(sample()), "m")->state, sample().state);
}

TEST(Manifest, SpaceEscapesAndTheOrderOfKeysDoNotMatter) {
  const auto json = nlohmann::json::parse(json_of(sample()));  // sorts the keys
  for (const std::string& text : {json.dump(2), "\n\t " + json.dump(0, ' ', true) + " \r\n"}) {
    auto manifest = manifest_from_json(text, "m");
    ASSERT_TRUE(manifest) << manifest.error().message;
    EXPECT_EQ(nlohmann::json::parse(manifest->state), json["state"]);
    manifest->state = sample().state;
    EXPECT_EQ(*manifest, sample());
  }
  EXPECT_EQ(manifest_from_json(with("model.weight", "\\u006dodel\\/w\\\"\\n"), "m")->tensors[0].name,
            "model/w\"\n");
  Manifest odd = sample();
  odd.tensors[0].name = std::string("a\"\\\n\x7f\0\xc3\xa9", 8);
  EXPECT_EQ(manifest_from_json(json_of(odd), "m")->tensors[0].name, odd.tensors[0].name);
}

TEST(Manifest, AnyFlippedBitIsFound) {
  const std::string text = *format_manifest(sample());
  for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    const auto parsed = parse_manifest(flipped, "/d/manifest-4");
    ASSERT_FALSE(parsed) << "bit " << bit;
    EXPECT_TRUE(parsed.error().kind == ErrorKind::corrupt || parsed.error().kind == ErrorKind::format);
    EXPECT_NE(parsed.error().message.find("/d/manifest-4"), std::string::npos);
  }
}

TEST(Manifest, AnyCutAndAnyTrailingByteIsFound) {
  const std::string text = *format_manifest(sample());
  for (std::size_t bytes = 0; bytes < text.size(); ++bytes)
    EXPECT_FALSE(parse_manifest(text.substr(0, bytes), "m")) << bytes;
  for (const char byte : {'\0', ' ', '\n', 'x', '}'}) EXPECT_FALSE(parse_manifest(text + byte, "m"));
}

TEST(Manifest, TheFirstLineShowsWhatIsWrong) {
  struct Case {
    std::string text;
    ErrorKind kind;
    std::string_view why;
  };
  const std::string json = json_of(sample());
  const std::string good = frame_manifest(json);
  const std::size_t crc = good.find("crc32c=") + 7;
  std::string other_crc = good;
  other_crc[crc] = other_crc[crc] == '0' ? '1' : '0';
  std::string upper = good;
  upper.replace(crc, 8, "ABCDEF00");
  const Case cases[] = {
      {"", ErrorKind::corrupt, "empty"},
      {json, ErrorKind::format, "does not begin with"},
      {other_crc, ErrorKind::corrupt, "CRC-32C"},
      {good.substr(0, good.size() - 1), ErrorKind::corrupt, "was truncated or extended"},
      {good + "\n", ErrorKind::corrupt, "was truncated or extended"},
      {upper, ErrorKind::format, "not name a checksum"},
      {"trunkline checkpoint 3 blake3=00 zstd\n", ErrorKind::format, "newer version"},
      {"trunkline checkpoint 18446744073709551615 x\n", ErrorKind::format, "newer version"},
      {"trunkline checkpoint 0 crc32c=00000000 bytes=2\n{}", ErrorKind::format, "version"},
      {"trunkline checkpoint 01 crc32c=00000000 bytes=2\n{}", ErrorKind::format, "version"},
      {"trunkline checkpoint one\n", ErrorKind::format, "version"},
      {"trunkline checkpoint 1 crc32c=00000000 bytes=02\n{}", ErrorKind::format, "size"},
      {"trunkline checkpoint 1 crc32c=00000000 bytes=\n{}", ErrorKind::format, "size"},
      {"trunkline checkpoint 1 crc32c=00000000 bytes=-2\n{}", ErrorKind::format, "size"},
      {"trunkline checkpoint 1 crc32c=0000", ErrorKind::format, "checksum"},
      {frame_manifest("{}"), ErrorKind::format, "\"step\" is missing"},
      {frame_manifest(""), ErrorKind::format, "not a JSON object"},
  };
  for (const auto& [text, kind, why] : cases) {
    const auto parsed = parse_manifest(text, "/d/m");
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error().kind, kind) << text;
    EXPECT_EQ(parsed.error().path, "/d/m");
    EXPECT_NE(parsed.error().message.find(why), std::string::npos) << parsed.error().message;
  }
}

struct FormatCase {
  std::string json;
  std::string_view why;
};

void expect_format_errors(std::span<const FormatCase> cases) {
  for (const auto& [json, why] : cases) {
    const auto parsed = parse_manifest(frame_manifest(json), "/d/m");
    ASSERT_FALSE(parsed) << json;
    EXPECT_EQ(parsed.error().kind, ErrorKind::format) << json;
    EXPECT_NE(parsed.error().message.find(why), std::string::npos)
        << why << ": " << parsed.error().message << "\n"
        << json;
  }
}

TEST(Manifest, AWrongFieldIsAFormatErrorThatNamesTheReason) {
  const FormatCase cases[] = {
      {"[]", "not a JSON object"},
      {with("\"step\":12,", ""), "\"step\" is missing"},
      {with("\"state\"", "\"State\""), "unknown key \"State\""},
      {with("\"state\"", "\"\\u0073tate\""), "unknown key \"\\u0073tate\""},
      {with("\"step\":12", "\"step\":12,\"step\":12"), "duplicated"},
      {with("\"step\":12", "\"step\":-1"), "\"step\""},
      {with("\"step\":12", "\"step\":12.0"), "\"step\""},
      {with("\"step\":12", "\"step\":9223372036854775808"), "\"step\""},
      {with("\"commit\":4", "\"commit\":0"), "\"commit\""},
      {with("\"commit\":4", "\"commit\":true"), "\"commit\""},
      {with("2026-01-31T23:59:59Z", "2026-01-31 23:59:59Z"), "\"time\""},
      {with("2026-01-31T23:59:59Z", "2026-13-31T23:59:59Z"), "\"time\""},
      {with("2026-01-31T23:59:59Z", "2026-01-31T23:5-:59Z"), "\"time\""},
      {with("\"chunk_bytes\":1048576", "\"chunk_bytes\":0"), "\"chunk_bytes\""},
      {with("\"chunk_bytes\":1048576", "\"chunk_bytes\":1048577"), "\"chunk_bytes\""},
      {with("\"chunk_bytes\":1048576", "\"chunk_bytes\":134217728"), "\"chunk_bytes\""},
      {with("\"chunk_bytes\":1048576", "\"chunk_bytes\":4096"), "checksums"},
      {with("\"world_size\":2", "\"world_size\":0"), "\"world_size\""},
      {with("\"/fast/run-0011\"", "\"fast\""), "volume"},
      {with("\"/fast/run-0011\"", "\"\""), "volume"},
      {with("\"/fast/run-0011\"", "\"/a\\u0000b\""), "volume"},
      {with("\"/fast/run-0011\"", "\".\""), "duplicated"},
      {with("\"/fast/run-0011\"", "7"), "\"volumes\""},
      {with("[\".\",\"/fast/run-0011\"]", "{}"), "\"volumes\" is not an array"},
      {with("\"state\":{", "\"state\":" + std::string(600, '[') + std::string(600, ']') + ",\"x\":{"),
       "nested"},
      {with("\"epoch\"", "\"z\""), "duplicated"},
  };
  expect_format_errors(cases);
}

TEST(Manifest, AWrongShardOrTensorIsAFormatErrorThatNamesTheReason) {
  const FormatCase cases[] = {
      {with("\"volume\":1", "\"volume\":2"), "volume 2 does not exist"},
      {with("\"volume\":1", "\"volume\":1,\"colour\":1"), "\"colour\""},
      {with("shard-b.safetensors", "../x"), "plain file name"},
      {with("shard-b.safetensors", "/x"), "plain file name"},
      {with("shard-b.safetensors", ".."), "plain file name"},
      {with("shard-b.safetensors", "."), "plain file name"},
      {with("shard-b.safetensors", ""), "plain file name"},
      {with("shard-b.safetensors", "a\\u0000"), "plain file name"},
      {with("shard-b.safetensors", std::string(256, 'x')), "plain file name"},
      {with("\"volume\":1,\"file\":\"shard-b", "\"volume\":0,\"file\":\"shard-a"), "duplicated"},
      {with("\"bytes\":1048577", "\"bytes\":1048576"), "checksums"},
      {with("\"bytes\":1048577", "\"bytes\":18446744073709551615"), "too large"},
      {with("ffffffff00000000", "ffffffff0000000"), "\"crc32c\""},
      {with("ffffffff00000000", "ffffffff0000000G"), "\"crc32c\""},
      {with("ffffffff00000000", "FFFFFFFF00000000"), "\"crc32c\""},
      {with("ffffffff00000000", "ffffffff"), "checksums"},
      {with("\"µ\"", "\"model.weight\""), "duplicated"},
      {with("\"BF16\"", "\"F32\""), "shape and dtype"},
      {with("\"BF16\"", "16"), "\"dtype\""},
      {with("torch.complex128", ""), "\"dtype\""},
      {with("torch.complex128", std::string(65, 't')), "\"dtype\""},
      {with("[40,25]", "[40,26]"), "shape and dtype"},
      {with("[40,25]", "[4294967296,4294967296]"), "shape and dtype"},
      {with("[40,25]", "[40,-25]"), "\"shape\""},
      {with("[40,25]", "1000"), "\"shape\""},
      {with("[0,5]", "[0,18446744073709551615]"), "\"shape\""},
      {with("[0,1000,1500]", "[0,1000,1499]"), "shape and dtype"},
      {with("[0,1000,1500]", "[0,1501,1500]"), "not within"},
      {with("[0,1000,1500]", "[0,18446744073709551615,1500]"), "not within"},
      {with("[0,1000,1500]", "[2,1000,1500]"), "shard 2 does not exist"},
      {with("[0,1000,1500]", "[0,1000]"), "a piece is not"},
      {with("[0,1000,1500]", "[0,1000,\"1500\"]"), "\"pieces\""},
      {with("{\"name\":\"\"", "{\"title\":1,\"name\":\"\""), "\"title\""},
  };
  expect_format_errors(cases);
}

TEST(Manifest, FeaturesMakeAVersionThatOlderReadersReject) {
  Manifest views = sample();
  EXPECT_TRUE(format_manifest(views)->starts_with("trunkline checkpoint 1 "));
  views.features = {std::string(kViewsFeature)};
  const std::string text = *format_manifest(views);
  EXPECT_TRUE(text.starts_with("trunkline checkpoint 2 "));
  EXPECT_EQ(*parse_manifest(text, "m"), views);
  const std::string json = json_of(views);
  const std::string plain = json_of(sample());
  const auto refused = [](const std::string& file, std::string_view why) {
    const auto parsed = parse_manifest(file, "/d/m");
    ASSERT_FALSE(parsed) << file;
    EXPECT_EQ(parsed.error().kind, ErrorKind::format);
    EXPECT_NE(parsed.error().message.find(why), std::string::npos) << parsed.error().message;
  };
  const auto changed = [&](std::string_view from, std::string_view to) {
    std::string other = json;
    return frame_manifest(other.replace(other.find(from), from.size(), to), kFeatureVersion);
  };
  refused(frame_manifest(json, kFirstVersion), "do not match its version, 1");
  refused(frame_manifest(plain, kFeatureVersion), "do not match its version, 2");
  refused(changed("[\"views\"]", "[]"), "\"features\" is empty");
  refused(changed("[\"views\"]", "{}"), "\"features\" is not an array");
  refused(changed("[\"views\"]", "[7]"), "\"features\" is not a string");
  refused(changed("[\"views\"]", "[\"views\",\"views\"]"), "duplicated");
  // Even if an unknown feature also changes other members.
  std::string newer = json;
  newer.replace(newer.find("[\"views\"]"), 9, "[\"views\",\"colours\"]");
  newer.replace(newer.find("\"step\":12,"), 10, "\"colour\":1,");
  refused(frame_manifest(newer, kFeatureVersion), "needs the feature \"colours\"");
}

TEST(Manifest, MetricsComeBackAsTheyWere) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Manifest measured = sample();
  measured.features = {std::string(kMetricsFeature)};
  measured.metrics = {{"loss", 0.1},
                      {"none", std::nan("")},
                      {"high", kInfinity},
                      {"low", -kInfinity},
                      {"zero", -0.0},
                      {"tiny", 5e-324},
                      {"big", 1.7976931348623157e308},
                      {"a\"b\\\n", 3},
                      {"gr\u00f6\u00dfe", 1}};
  const std::string text = *format_manifest(measured);
  EXPECT_TRUE(text.starts_with("trunkline checkpoint 2 "));
  EXPECT_NE(text.find(R"(Z","metrics":{"loss":0.1,"none":"NaN","high":"Infinity","low":"-Infinity",)"),
            std::string::npos)
      << text;
  EXPECT_EQ(*parse_manifest(text, "m"), measured);

  const std::string json = json_of(measured);
  const auto refused = [&](std::string_view from, std::string_view to, std::string_view why) {
    std::string other = json;
    const auto parsed = manifest_from_json(other.replace(other.find(from), from.size(), to), "/d/m");
    ASSERT_FALSE(parsed) << to;
    EXPECT_EQ(parsed.error().kind, ErrorKind::format);
    EXPECT_NE(parsed.error().message.find(why), std::string::npos) << parsed.error().message;
  };
  refused("0.1", "\"0.1\"", "the metric \"loss\" is not a number");
  refused("0.1", "1e999", "not a JSON object");
  refused("0.1", "true", "the metric \"loss\" is not a number");
  refused("\"none\"", "\"loss\"", "duplicated");
  refused("\"none\"", "\"l\\u006fss\"", "the key \"loss\" is duplicated");
  refused("\"none\"", "\"\"", "a metric has no name");
  refused("[\"metrics\"]", "[\"views\"]", "require each other");
  measured.metrics = {{"loss", 1}, {"loss", 2}};
  EXPECT_EQ(format_manifest(measured).error().kind, ErrorKind::invalid_argument);
  measured.metrics.clear();
  EXPECT_EQ(format_manifest(measured).error().kind, ErrorKind::invalid_argument);
}

Manifest incremental() {
  Manifest manifest = sample();
  manifest.features = {std::string(kIncrementalFeature)};
  manifest.unit_bytes = kMinChunkBytes;
  manifest.shards[0].commit = 3;
  manifest.tensors[0].digests = {{.first = 0, .digests = {{.ecma = 1, .jones = 0xFEDCBA9876543210}}}};
  return manifest;
}

TEST(Manifest, DigestsAndCommitsOfShardsComeBackAsTheyWere) {
  const Manifest manifest = incremental();
  const std::string text = *format_manifest(manifest);
  EXPECT_TRUE(text.starts_with("trunkline checkpoint 2 "));
  EXPECT_NE(text.find(R"("digests":[[0,"0000000000000001fedcba9876543210"]])"), std::string::npos) << text;
  EXPECT_NE(text.find(R"(,"commit":3})"), std::string::npos) << text;
  EXPECT_EQ(*parse_manifest(text, "m"), manifest);
  EXPECT_EQ(bytes_written(manifest), manifest.shards[1].bytes);
}

TEST(Manifest, WhatIncrementalManifestsMayNotHave) {
  const std::string json = json_of(incremental());
  const auto refused = [&](std::string_view from, std::string_view to, std::string_view why) {
    std::string other = json;
    const auto parsed = manifest_from_json(other.replace(other.find(from), from.size(), to), "/d/m");
    ASSERT_FALSE(parsed) << to;
    EXPECT_EQ(parsed.error().kind, ErrorKind::format);
    EXPECT_NE(parsed.error().message.find(why), std::string::npos) << parsed.error().message;
  };
  refused("[\"incremental\"]", "[\"views\"]", "require each other");
  refused("\"unit_bytes\":4096", "\"unit_bytes\":0", "\"unit_bytes\" is 0");
  refused("\"unit_bytes\":4096", "\"unit_bytes\":4097", "power of two");
  refused("\"commit\":3}", "\"commit\":0}", "\"commit\" is 0");
  refused("[0,\"00000000", "[0,\"0000000", "32 lower-case");
  refused("[0,\"0000000000000001f", "[0,\"0000000000000001F", "32 lower-case");
  refused("[[0,\"0000000000000001fedcba9876543210\"]]", "[]", "\"digests\" is empty");
  refused("[[0,\"0000000000000001fedcba9876543210\"]]", "[[0,\"\"]]", "without any");
  refused("[0,\"0000000000000001f", "[1,\"0000000000000001f", "more units");
  refused("[0,\"0000000000000001f", "[18446744073709551615,\"0000000000000001f", "more units");
  refused("\"digests\":[[0,", "\"digests\":[0,[0,", "not [first, digests]");
  Manifest twice = incremental();
  twice.tensors[0].digests.push_back(twice.tensors[0].digests[0]);
  EXPECT_NE(format_manifest(twice).error().message.find("ascending"), std::string::npos);
  const auto without = [](auto change) {
    Manifest manifest = sample();
    change(manifest);
    return format_manifest(manifest).error().message;
  };
  EXPECT_NE(without([](Manifest& m) { m.shards[0].commit = 3; }).find("incremental"), std::string::npos);
  EXPECT_NE(without([](Manifest& m) {
              m.tensors[0].digests = {{.first = 0, .digests = {{}}}};
            }).find("incremental"),
            std::string::npos);
}

TEST(Manifest, FormattingRejectsWhatParsingWouldReject) {
  const auto refused = [](auto change, std::string_view why) {
    Manifest manifest = sample();
    change(manifest);
    const auto text = format_manifest(manifest);
    ASSERT_FALSE(text) << why;
    EXPECT_EQ(text.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(text.error().message.find(why), std::string::npos) << text.error().message;
  };
  refused([](Manifest& m) { m.commit = 0; }, "commit");
  refused([](Manifest& m) { m.shards[0].bytes = kChunkBytes + 1; }, "checksums");
  refused([](Manifest& m) { m.tensors[0].pieces[0].bytes = 1; }, "shape and dtype");
  refused([](Manifest& m) { m.tensors[0].name = "\xff"; }, "UTF-8");
  refused([](Manifest& m) { m.features = {"colours"}; }, "features");
  refused([](Manifest& m) { m.state = ""; }, "state");
  refused([](Manifest& m) { m.state = "1,\"more\":2"; }, "single JSON value");
  refused([](Manifest& m) { m.state = "NaN"; }, "state");
  refused([](Manifest& m) { m.state = R"({"a":1,"a":2})"; }, "duplicated");
}

}  // namespace
}  // namespace trunkline::checkpoint
