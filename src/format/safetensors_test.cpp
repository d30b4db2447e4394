#include "format/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

namespace trunkline::format {
namespace {

std::string entry(std::string_view name, std::string_view dtype, std::string_view shape,
                  std::string_view offsets) {
  return "\"" + std::string(name) + "\":{\"dtype\":\"" + std::string(dtype) +
         "\",\"shape\":" + std::string(shape) + ",\"data_offsets\":" + std::string(offsets) + "}";
}

// Parses the header of a file that ends `data_bytes` after it.
Result<SafetensorsHeader> parse(const std::string& json, std::uint64_t data_bytes) {
  return parse_safetensors(json, kLengthBytes + json.size() + data_bytes, "model.safetensors");
}

TEST(Safetensors, ReadsTensorsInTheOrderOfTheirBytes) {
  const std::string json = "{" + entry("z", "BF16", "[2,3]", "[4,16]") +
                           ",\"__metadata__\":{\"format\":\"pt\"}," + entry("a", "F32", "[]", "[0,4]") + "," +
                           entry("none", "I64", "[0,7]", "[16,16]") + "}   ";
  const auto header = parse(json, 16);
  ASSERT_TRUE(header) << header.error().message;
  EXPECT_EQ(header->metadata, (Metadata{{"format", "pt"}}));
  ASSERT_EQ(header->tensors.size(), 3U);
  const std::uint64_t data = kLengthBytes + json.size();
  EXPECT_EQ(header->tensors[0], (StoredTensor{"a", Dtype::f32, {}, data, data + 4}));
  EXPECT_EQ(header->tensors[1], (StoredTensor{"z", Dtype::bf16, {2, 3}, data + 4, data + 16}));
  EXPECT_EQ(header->tensors[2], (StoredTensor{"none", Dtype::i64, {0, 7}, data + 16, data + 16}));
}

TEST(Safetensors, UnknownFieldsAreIgnored) {
  EXPECT_TRUE(parse(R"({"a":{"dtype":"U8","shape":[],"more":[{}],"data_offsets":[0,1]}})", 1));
}

TEST(Safetensors, EmptyFilesAreValid) {
  EXPECT_TRUE(parse("{}", 0));
  EXPECT_TRUE(parse("{\"__metadata__\":{}}", 0));
}

struct Bad {
  const char* what;
  std::string json;
  std::uint64_t data_bytes;
  const char* says;
};

class BadSafetensors : public testing::TestWithParam<Bad> {};

TEST_P(BadSafetensors, IsRejectedWithThePlaceAndTheCause) {
  const auto header = parse(GetParam().json, GetParam().data_bytes);
  ASSERT_FALSE(header);
  const bool cut_off = std::string_view(GetParam().what) == "CutOff";
  EXPECT_EQ(header.error().kind, cut_off ? ErrorKind::corrupt : ErrorKind::format);
  EXPECT_EQ(header.error().path, "model.safetensors");
  EXPECT_NE(header.error().message.find(GetParam().says), std::string::npos) << header.error().message;
}

const std::string kA = entry("a", "U8", "[4]", "[0,4]");

INSTANTIATE_TEST_SUITE_P(
    Every, BadSafetensors,
    testing::Values(
        Bad{"NotJson", "{\"a\":", 0, "not a JSON object"}, Bad{"Empty", "", 0, "does not begin"},
        Bad{"Array", "[]", 0, "does not begin"}, Bad{"SpaceFirst", " {}", 0, "does not begin"},
        Bad{"ByteOrderMark", "\xEF\xBB\xBF{}", 0, "does not begin"},
        Bad{"ZeroByteBehind", std::string("{}\0", 3), 0, "zero byte"},
        Bad{"Trailing", "{}{}", 0, "not a JSON object"},
        Bad{"NotUtf8", "{\"\xFF\":{}}", 0, "not a JSON object"},
        Bad{"Repeated", "{" + kA + "," + kA + "}", 4, "\"a\" is duplicated"},
        Bad{"RepeatedField", R"({"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1,
            "\"dtype\" is duplicated"},
        Bad{"Deep", "{\"a\":" + std::string(200, '[') + std::string(200, ']') + "}", 0, "nested too deeply"},
        Bad{"TensorIsNumber", "{\"a\":1}", 0, "tensor \"a\""},
        Bad{"UnknownDtype", "{" + entry("a", "F7", "[4]", "[0,4]") + "}", 4, "\"F7\" is unknown"},
        Bad{"NoDtype", R"({"a":{"shape":[],"data_offsets":[0,1]}})", 1, "\"dtype\" is missing"},
        Bad{"NegativeExtent", "{" + entry("a", "U8", "[-4]", "[0,4]") + "}", 4, "\"shape\""},
        Bad{"FractionalExtent", "{" + entry("a", "U8", "[4.0]", "[0,4]") + "}", 4, "\"shape\""},
        Bad{"ExtentBeyond64Bits", "{" + entry("a", "U8", "[18446744073709551616]", "[0,4]") + "}", 4,
            "\"shape\""},
        Bad{"ThreeOffsets", "{" + entry("a", "U8", "[4]", "[0,4,4]") + "}", 4, "\"data_offsets\""},
        Bad{"Reversed", "{" + entry("a", "U8", "[4]", "[4,0]") + "}", 4, "offsets 4 .. 0"},
        Bad{"Hole", "{" + kA + "," + entry("b", "U8", "[4]", "[5,9]") + "}", 9,
            "do not continue the data at 4"},
        Bad{"Overlap", "{" + kA + "," + entry("b", "U8", "[4]", "[3,7]") + "}", 7,
            "do not continue the data at 4"},
        Bad{"ShapeDiffers", "{" + entry("a", "U8", "[5]", "[0,4]") + "}", 4, "do not match its shape"},
        Bad{"Overflow", "{" + entry("a", "U8", "[4294967296,4294967296,4]", "[0,0]") + "}", 0,
            "do not match its shape"},
        Bad{"OverflowBeforeZero", "{" + entry("a", "U8", "[4294967296,4294967296,0]", "[0,0]") + "}", 0,
            "do not match its shape"},
        Bad{"OverflowOfBits", "{" + entry("a", "F64", "[2305843009213693952]", "[0,0]") + "}", 0,
            "do not match its shape"},
        Bad{"HalfBytes", "{" + entry("a", "F4", "[3]", "[0,1]") + "}", 1, "do not match its shape"},
        Bad{"CutOff", "{" + kA + "}", 3, "need 4 bytes, but 3 follow"},
        Bad{"BytesBehind", "{" + kA + "}", 5, "need 4 bytes, but 5 follow"},
        Bad{"MetadataNoObject", "{\"__metadata__\":null}", 0, "__metadata__"},
        Bad{"MetadataNoString", "{\"__metadata__\":{\"a\":1}}", 0, "\"a\" is not a string"}),
    [](const auto& bad) { return std::string(bad.param.what); });

TEST(Safetensors, TheLengthMustFitTheFile) {
  std::array<std::byte, kLengthBytes> head{std::byte{10}};
  EXPECT_EQ(parse_safetensors_length(head, 18, "f"), 10U);
  EXPECT_EQ(parse_safetensors_length(head, 17, "f").error().kind, ErrorKind::corrupt);
  EXPECT_EQ(parse_safetensors_length(head, 3, "f").error().kind, ErrorKind::corrupt);
  head.back() = std::byte{0x80};
  EXPECT_EQ(parse_safetensors_length(head, ~std::uint64_t{0}, "f").error().kind, ErrorKind::format);
  head = {};
  head[3] = std::byte{0x06};  // 100,663,296
  EXPECT_EQ(parse_safetensors_length(head, 1ULL << 40, "f").error().kind, ErrorKind::format);
}

std::vector<TensorToStore> random_tensors(std::mt19937_64& random) {
  std::vector<TensorToStore> tensors(random() % 12);
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    tensors[index].name = "layer \"" + std::to_string(index) + "\"\n\u00e9";
    do {
      tensors[index].dtype = static_cast<Dtype>(random() % (static_cast<std::size_t>(Dtype::u64) + 1));
      tensors[index].shape.assign(random() % 4, 0);
      for (std::uint64_t& extent : tensors[index].shape) extent = random() % 3 == 0 ? 1024 : random() % 9;
    } while (!tensor_bytes(tensors[index].dtype, tensors[index].shape));
  }
  return tensors;
}

TEST(Safetensors, ALayoutIsReadBackAndAligned) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    const auto tensors = random_tensors(random);
    const std::uint64_t alignment = 8ULL << (random() % 10);
    const Metadata metadata = round % 2 == 0 ? Metadata{} : Metadata{{"format", "pt"}, {"a\\", "\t"}};
    const auto layout = lay_out_safetensors(tensors, metadata, alignment);
    ASSERT_TRUE(layout) << layout.error().message;
    ASSERT_EQ(layout->head.size() % alignment, 0U);

    std::array<std::byte, kLengthBytes> length_bytes{};
    std::memcpy(length_bytes.data(), layout->head.data(), kLengthBytes);
    const auto length = parse_safetensors_length(length_bytes, layout->file_bytes, "f");
    ASSERT_EQ(length, layout->head.size() - kLengthBytes);
    const auto header =
        parse_safetensors(std::string_view(layout->head).substr(kLengthBytes), layout->file_bytes, "f");
    ASSERT_TRUE(header) << header.error().message;
    EXPECT_EQ(header->metadata, metadata);
    auto by_name = header->tensors;
    auto expected = layout->tensors;
    std::ranges::sort(by_name, {}, &StoredTensor::name);
    std::ranges::sort(expected, {}, &StoredTensor::name);
    EXPECT_EQ(by_name, expected);
    for (const StoredTensor& tensor : layout->tensors) {
      if ((tensor.end - tensor.begin) % alignment == 0) {
        EXPECT_EQ(tensor.begin % alignment, 0U);
      }
      EXPECT_EQ(tensor.begin % std::max(1U, bits_of(tensor.dtype) / 8), 0U) << tensor.name;
    }
  }
}

TEST(Safetensors, LayingOutChecksItsArguments) {
  const auto kind_of = [](const std::vector<TensorToStore>& tensors, std::uint64_t alignment = 4096) {
    const auto layout = lay_out_safetensors(tensors, {}, alignment);
    return layout ? std::nullopt : std::optional(layout.error().kind);
  };
  const auto refused = std::optional(ErrorKind::invalid_argument);
  EXPECT_EQ(kind_of({}), std::nullopt);
  EXPECT_EQ(kind_of({}, 100), refused);
  EXPECT_EQ(kind_of({}, 4), refused);
  EXPECT_EQ(kind_of({{"a", Dtype::u8, {1}}, {"a", Dtype::u8, {1}}}), refused);
  EXPECT_EQ(kind_of({{"__metadata__", Dtype::u8, {1}}}), refused);
  EXPECT_EQ(kind_of({{"\xFF", Dtype::u8, {1}}}), refused);
  EXPECT_EQ(kind_of({{"a", Dtype::f4, {3}}}), refused);
  const std::uint64_t huge = 1ULL << 60;
  EXPECT_EQ(kind_of({{"a", Dtype::u8, {huge}}, {"b", Dtype::u8, {huge, 16}}}), refused);
}

TEST(SafetensorsTest, TheGivenOrderIsKept) {
  const std::vector<TensorToStore> tensors = {
      {"a", Dtype::u8, {5}}, {"b", Dtype::f32, {1024}}, {"c", Dtype::bf16, {3}}};
  const auto layout = lay_out_safetensors(tensors, {}, 4096, StorageOrder::given);
  ASSERT_TRUE(layout);
  const std::uint64_t begin = layout->head.size();
  EXPECT_EQ(begin % 4096, 0U);
  EXPECT_EQ(layout->tensors[0].begin, begin);
  EXPECT_EQ(layout->tensors[1].begin, begin + 5);
  EXPECT_EQ(layout->tensors[2].begin, begin + 5 + 4096);
  EXPECT_EQ(layout->file_bytes, begin + 5 + 4096 + 6);
}

}  // namespace
}  // namespace trunkline::format
