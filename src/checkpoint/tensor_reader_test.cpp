#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "checkpoint/store_fixture.h"
#include "format/safetensors.h"
#include "trunkline/tensors.h"

namespace trunkline {
namespace {

using format::Dtype;

class TensorReaderTest : public test::StoreTest {
 protected:
  // A file of two tensors of bytes that count up from `first`, without checksums.
  std::string write_file(const std::string& name, const std::string& first_tensor, std::uint8_t first) const {
    const std::vector<format::TensorToStore> tensors = {{first_tensor, Dtype::u8, {100, 50}},
                                                        {first_tensor + ".bias", Dtype::bf16, {7}}};
    const auto layout = format::lay_out_safetensors(tensors, {{"from", name}}, 8);
    EXPECT_TRUE(layout) << layout.error().message;
    std::string contents = layout->head;
    contents.resize(layout->file_bytes);
    for (std::size_t i = layout->head.size(); i < contents.size(); ++i)
      contents[i] = static_cast<char>(first + (i - layout->head.size()));
    std::filesystem::create_directories(root_.file("model"));
    const std::string path = root_.file("model/" + name);
    std::ofstream(path, std::ios::binary) << contents;
    return path;
  }

  static std::vector<std::byte> read(const TensorReader& reader, std::string_view name) {
    const TensorInfo* tensor = reader.find(name);
    EXPECT_NE(tensor, nullptr);
    std::vector<std::byte> memory(tensor == nullptr ? 0 : tensor->bytes);
    const Status status = reader.read(name, std::span(memory));
    EXPECT_TRUE(status) << status.error().message;
    return memory;
  }

  static std::vector<std::byte> counting_from(std::size_t first, std::size_t count) {
    std::vector<std::byte> bytes(count);
    for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(first + i);
    return bytes;
  }
};

TEST_F(TensorReaderTest, ReadsAFileWithoutChecksums) {
  const std::string path = write_file("a.safetensors", "w", 3);
  const auto reader = TensorReader::open(path);
  ASSERT_TRUE(reader) << reader.error().message;
  ASSERT_EQ(reader->tensors().size(), 2U);
  EXPECT_EQ(reader->find("w")->dtype, "U8");
  EXPECT_EQ(reader->find("w")->shape, (std::vector<std::uint64_t>{100, 50}));
  EXPECT_EQ(reader->find("w.bias")->bytes, 14U);
  EXPECT_EQ(reader->find("v"), nullptr);
  EXPECT_EQ(reader->metadata(), (std::map<std::string, std::string>{{"from", "a.safetensors"}}));
  EXPECT_FALSE(reader->has_checksums());
  const auto header_first = reader->tensors()[0].name;
  EXPECT_EQ(read(*reader, header_first), counting_from(3, reader->tensors()[0].bytes));

  const auto required = TensorReader::open(path, {.verify = Verify::always});
  ASSERT_FALSE(required);
  EXPECT_EQ(required.error().kind, ErrorKind::format);
  EXPECT_EQ(required.error().path, path);
}

TEST_F(TensorReaderTest, RequestsThatAreWrongNameTheTensor) {
  const auto reader = TensorReader::open(write_file("a.safetensors", "w", 0));
  ASSERT_TRUE(reader) << reader.error().message;
  std::vector<std::byte> memory(5000);
  const auto rejected = [&](std::vector<TensorRead> reads, std::string_view says) {
    const Status status = reader->read(reads);
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(status.error().message.find(says), std::string::npos) << status.error().message;
  };
  rejected({{"v", std::span(memory)}}, "no tensor \"v\"");
  rejected({{"w", std::span(memory).first(4999)}}, "\"w\" has 4999 bytes, but the tensor has 5000");
  rejected({{"w", std::span(memory)}, {"w", std::span(memory)}}, "\"w\" is listed twice");
  EXPECT_TRUE(reader->read(std::span<const TensorRead>{}));
}

TEST_F(TensorReaderTest, AModelIsTheFilesOfItsIndex) {
  write_file("a.safetensors", "a", 1);
  write_file("b.safetensors", "b", 2);
  write_file("c.safetensors", "c", 3);  // not in the index
  const std::string index = root_.file("model/model.safetensors.index.json");
  std::ofstream(index) << R"({"weight_map": {"a": "a.safetensors", "a.bias": "a.safetensors",)"
                       << R"( "b": "b.safetensors", "b.bias": "b.safetensors"}})";
  const auto reader = TensorReader::open(root_.file("model"));
  ASSERT_TRUE(reader) << reader.error().message;
  EXPECT_EQ(reader->tensors().size(), 4U);
  EXPECT_NE(read(*reader, "a"), read(*reader, "b"));

  std::ofstream(index) << R"({"weight_map": {"a": "a.safetensors", "c": "a.safetensors"}})";
  const auto missing = TensorReader::open(root_.file("model"));
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().kind, ErrorKind::format);
  EXPECT_NE(missing.error().message.find("tensor \"c\" is not in a.safetensors"), std::string::npos)
      << missing.error().message;

  std::ofstream(index) << R"({"weight_map": {"a": "../a.safetensors"}})";
  const auto outside = TensorReader::open(root_.file("model"));
  ASSERT_FALSE(outside);
  EXPECT_EQ(outside.error().kind, ErrorKind::format);

  // The same names in two files.
  write_file("b.safetensors", "a", 2);
  std::ofstream(index) << R"({"weight_map": {"a": "a.safetensors", "a.bias": "b.safetensors"}})";
  const auto twice = TensorReader::open(root_.file("model"));
  ASSERT_FALSE(twice);
  EXPECT_NE(twice.error().message.find("tensor \"a\" is also in another file"), std::string::npos);
}

TEST_F(TensorReaderTest, OneFileIsTheModelEvenIfAnEarlierIndexIsLeft) {
  write_file("a.safetensors", "a", 1);
  write_file("model.safetensors", "b", 2);
  std::ofstream(root_.file("model/model.safetensors.index.json"))
      << R"({"weight_map": {"a": "a.safetensors"}})";
  const auto reader = TensorReader::open(root_.file("model"));
  ASSERT_TRUE(reader) << reader.error().message;
  EXPECT_EQ(reader->find("a"), nullptr);
  EXPECT_EQ(read(*reader, "b")[0], counting_from(2, 1)[0]);
}

TEST_F(TensorReaderTest, AModelMayHaveTheNameOfAStep) {
  write_file("model.safetensors", "a", 1);
  std::filesystem::rename(root_.file("model"), root_.file("step-00000007"));
  const auto reader = TensorReader::open(root_.file("step-00000007"));
  ASSERT_TRUE(reader) << reader.error().message;
  EXPECT_NE(reader->find("a"), nullptr);
}

TEST_F(TensorReaderTest, ADirectoryWithoutTensorsIsNotFound) {
  const auto reader = TensorReader::open(root_.path());
  ASSERT_FALSE(reader);
  EXPECT_EQ(reader.error().code, ENOENT);
  EXPECT_EQ(TensorReader::open(root_.file("nothing.safetensors")).error().code, ENOENT);
}

TEST_F(TensorReaderTest, AStepIsReadFromItsVolumesAndVerified) {
  const auto store = open({.volumes = volumes()});
  save(*store, 5);
  save(*store, 6);
  const auto manifest = store->read_manifest(6);
  ASSERT_TRUE(manifest) << manifest.error().message;
  const auto reader = TensorReader::open(directory());  // the latest
  ASSERT_TRUE(reader) << reader.error().message;
  EXPECT_TRUE(reader->has_checksums());
  ASSERT_EQ(reader->tensors().size(), manifest->tensors.size());
  ASSERT_GT(reader->tensors().size(), 1U);

  std::vector<std::vector<std::byte>> memory;
  std::vector<TensorRead> reads;
  for (const TensorInfo& tensor : reader->tensors()) memory.emplace_back(tensor.bytes);
  for (std::size_t i = 0; i < memory.size(); ++i)
    reads.push_back({reader->tensors()[i].name, std::span(memory[i])});
  // Removed meanwhile: what was opened is read.
  ASSERT_TRUE(store->remove(6));
  const Status status = reader->read(reads);
  ASSERT_TRUE(status) << status.error().message;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    std::vector<std::byte> expected(5000);
    test::fill_random(expected, 6000 + i);
    expected.erase(expected.begin(), expected.begin() + 100);
    EXPECT_EQ(memory[i], expected) << i;
  }
  const auto named = TensorReader::open(directory() + "/step-00000005");
  ASSERT_TRUE(named) << named.error().message;
  EXPECT_NE(read(*named, "t0"), memory[0]);
  EXPECT_EQ(TensorReader::open(directory() + "/step-00000006").error().code, ENOENT);
}

TEST_F(TensorReaderTest, DamageNamesTheTensorAndNeverOthers) {
  const auto store = open();
  save(*store, 1);
  const auto manifest = store->read_manifest(1);
  ASSERT_TRUE(manifest) << manifest.error().message;
  const std::string path = checkpoint::shard_path(store->directory(), *manifest, 0);
  {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(3000);
    const char flipped = static_cast<char>(file.peek() ^ 1);
    file.seekp(3000);
    file.put(flipped);
  }
  const auto reader = TensorReader::open(directory());
  ASSERT_TRUE(reader) << reader.error().message;
  std::vector<std::byte> memory(reader->find("t0")->bytes);
  const Status status = reader->read("t0", std::span(memory));
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().kind, ErrorKind::corrupt);
  EXPECT_EQ(status.error().path, path);
  EXPECT_NE(status.error().message.find("tensors t0;"), std::string::npos) << status.error().message;
  EXPECT_TRUE(reader->read("t1", std::span(memory)));

  const auto trusting = TensorReader::open(directory(), {.verify = Verify::never});
  ASSERT_TRUE(trusting) << trusting.error().message;
  EXPECT_TRUE(trusting->read("t0", std::span(memory)));
}

}  // namespace
}  // namespace trunkline
