#include "base/strict_json.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/sanitizers.h"

namespace trunkline {
namespace {

TEST(ParseJsonObject, ReturnsTheObject) {
  const auto object = parse_json_object(R"({"a":[1,-2,0.5,true,null,"x",{"a":{}}],"b":{}})", 4);
  ASSERT_TRUE(object) << object.error();
  EXPECT_EQ(object->dump(), R"({"a":[1,-2,0.5,true,null,"x",{"a":{}}],"b":{}})");
}

TEST(PartsOfJson, MembersAreReturnedAsText) {
  using Members = std::vector<std::pair<std::string_view, std::string_view>>;
  using Items = std::vector<std::string_view>;
  EXPECT_EQ(members_of(R"( { "a" : [1, "}"] ,"b\"":{"c":null} , "" : -1.5e3 } )"),
            (Members{{"a", R"([1, "}"])"}, {R"(b\")", R"({"c":null})"}, {"", "-1.5e3"}}));
  EXPECT_EQ(members_of("{}"), Members{});
  EXPECT_EQ(members_of(" { } "), Members{});
  EXPECT_EQ(items_of(R"([ 1 , "],\\" ,{"a":[2]},[[]] , true ])"),
            (Items{"1", R"("],\\")", R"({"a":[2]})", "[[]]", "true"}));
  EXPECT_EQ(items_of("[]"), Items{});
  EXPECT_EQ(items_of("[ ]"), Items{});
}

TEST(ParseJsonObject, RejectsWhatALenientParserLetsPass) {
  using namespace std::string_view_literals;
  EXPECT_EQ(parse_json_object(R"({"a":1,"b":{"a":1,"a":2}})", 4).error(), "the key \"a\" is duplicated");
  EXPECT_EQ(parse_json_object("{\"a\":1,\"\\u0061\":1}", 4).error(), "the key \"a\" is duplicated");
  EXPECT_EQ(parse_json_object("{}\0"sv, 4).error(), "it contains a zero byte");
  for (const std::string_view text : {"[]", "1", "", "{", "{}{}", "{\"a\":1,}", "{'a':1}", "{\"a\":NaN}",
                                      "{\"a\":1e999}", "{\"\xFF\":1}", "{\"\\ud800\":1}"}) {
    EXPECT_EQ(parse_json_object(text, 4).error(), "it is not a JSON object") << text;
  }
}

TEST(ParseJsonObject, LimitsTheDepth) {
  EXPECT_TRUE(parse_json_object("{}", 1));
  EXPECT_TRUE(parse_json_object("{\"a\":[{}]}", 3));
  EXPECT_EQ(parse_json_object("{\"a\":[{}]}", 2).error(), "its JSON is nested too deeply");
  std::string deep = "{\"a\":";
  deep.resize(1'000'000, '[');
  EXPECT_EQ(parse_json_object(deep, 100).error(), "its JSON is nested too deeply");
}

// Quadratic time would exceed the test's time limit.
TEST(ParseJsonObject, ManyMembersTakeLinearTime) {
  constexpr int kMembers = test::scaled(300'000);
  std::string text = "{";
  for (int member = 0; member < kMembers; ++member) text += fmt::format(R"("{}":{{"a":[]}},)", member);
  text.back() = '}';
  const auto object = parse_json_object(text, 4);
  ASSERT_TRUE(object) << object.error();
  EXPECT_EQ(object->size(), static_cast<std::size_t>(kMembers));
}

TEST(MemberText, IsTheValueExactlyAsWritten) {
  struct Case {
    std::string_view object;
    std::string_view value;
  };
  const Case cases[] = {
      {R"({"state":1})", "1"},
      {R"({"state":123456789012345678901234567890,"a":2})", "123456789012345678901234567890"},
      {R"({"a":{"state":1},"state":{"b":1,"a":[2,"}"]},"z":0})", R"({"b":1,"a":[2,"}"]})"},
      {R"({"a":"\"state\":5,","state":"x\\"})", R"("x\\")"},
      {"{ \"a\" : [ ] , \"state\" : true \n}", "true"},
      {R"({"a":"state","b":["state",{"state":7}]})", ""},
      {R"({"stat\u0065":1})", ""},
      {"{}", ""},
      {" {\n} ", ""},
  };
  for (const auto& [object, value] : cases) {
    ASSERT_TRUE(parse_json_object(object, 5)) << object;
    EXPECT_EQ(member_text(object, "state"), value) << object;
  }
}

TEST(StrictJson, AKeyWithEscapesDiffersFromItsSpelling) {
  constexpr std::string_view object = R"({"a\n": 1, "a\\n": 2})";  // "a", line feed; "a", backslash, "n"
  ASSERT_TRUE(parse_json_object(object, 1));
  EXPECT_EQ(member_text(object, R"(a\n)"), "");
  EXPECT_EQ(member_text(object, R"(a\\n)"), "");
}

}  // namespace
}  // namespace trunkline
