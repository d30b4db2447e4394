// safetensors (https://huggingface.co/docs/safetensors): 8 bytes of length, a JSON object that lists the
// tensors and where their bytes are, then nothing but those bytes. Parsing and layout; no I/O.
//
// A file that the reference implementation rejects is rejected here; some that it leniently accepts (repeated
// keys, space before the JSON, tensors given as arrays) are rejected too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trunkline/error.h"

namespace trunkline::format {

enum class Dtype {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64,
};

std::string_view name_of(Dtype dtype);  // as in the file, "BF16"
unsigned bits_of(Dtype dtype);          // of one element
std::optional<Dtype> dtype_named(std::string_view name);

// The size of a dense tensor; nullopt if it does not fit 64 bits or its elements do not fill whole bytes.
std::optional<std::uint64_t> tensor_bytes(Dtype dtype, std::span<const std::uint64_t> shape);

inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr std::uint64_t kLengthBytes = 8;
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the reference's limit on the JSON

struct StoredTensor {
  std::string name;
  Dtype dtype = Dtype::u8;
  std::vector<std::uint64_t> shape;  // in elements
  std::uint64_t begin = 0;           // bytes from the file's start
  std::uint64_t end = 0;
  bool operator==(const StoredTensor&) const = default;
};

using Metadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  Metadata metadata;
  std::vector<StoredTensor> tensors;  // in the order of their bytes
};

// The size of the JSON, from the file's first kLengthBytes; `format` if a file of `file_bytes` cannot hold
// that many.
Result<std::uint64_t> parse_safetensors_length(std::span<const std::byte, kLengthBytes> head,
                                               std::uint64_t file_bytes, const std::string& path);

// `json`: as long as parse_safetensors_length says. Checks that the tensors cover the data exactly: all lie
// within the file, none overlap, and every byte belongs to one.
Result<SafetensorsHeader> parse_safetensors(std::string_view json, std::uint64_t file_bytes,
                                            const std::string& path);

struct TensorToStore {
  std::string name;
  Dtype dtype = Dtype::u8;
  std::vector<std::uint64_t> shape;
};

struct SafetensorsLayout {
  std::string head;                   // length and JSON, as written to the file
  std::vector<StoredTensor> tensors;  // in the order of the request
  std::uint64_t file_bytes = 0;
};

enum class StorageOrder {
  aligned_first,  // tensors whose size is a multiple of the alignment come first and are aligned to it, the
                  // others follow by the size of their elements, so that each is aligned to those
  given,          // in the order of the request, which fills gaps itself
};

// Decides where each tensor goes. The data begin at a multiple of `alignment` (a power of two, at least 8;
// the JSON is padded with spaces), and the format allows no gaps.
Result<SafetensorsLayout> lay_out_safetensors(std::span<const TensorToStore> tensors,
                                              const Metadata& metadata, std::uint64_t alignment,
                                              StorageOrder storage_order = StorageOrder::aligned_first);

}  // namespace trunkline::format
