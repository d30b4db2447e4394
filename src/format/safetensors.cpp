#include "format/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "base/strict_json.h"

namespace trunkline::format {
namespace {

using Json = nlohmann::json;

struct DtypeFacts {
  Dtype dtype;
  std::string_view name;
  unsigned bits;
};
constexpr std::array kDtypes = {
    DtypeFacts{Dtype::boolean, "BOOL", 8},
    DtypeFacts{Dtype::f4, "F4", 4},
    DtypeFacts{Dtype::f6_e2m3, "F6_E2M3", 6},
    DtypeFacts{Dtype::f6_e3m2, "F6_E3M2", 6},
    DtypeFacts{Dtype::u8, "U8", 8},
    DtypeFacts{Dtype::i8, "I8", 8},
    DtypeFacts{Dtype::f8_e5m2, "F8_E5M2", 8},
    DtypeFacts{Dtype::f8_e4m3, "F8_E4M3", 8},
    DtypeFacts{Dtype::f8_e8m0, "F8_E8M0", 8},
    DtypeFacts{Dtype::f8_e4m3fnuz, "F8_E4M3FNUZ", 8},
    DtypeFacts{Dtype::f8_e5m2fnuz, "F8_E5M2FNUZ", 8},
    DtypeFacts{Dtype::i16, "I16", 16},
    DtypeFacts{Dtype::u16, "U16", 16},
    DtypeFacts{Dtype::f16, "F16", 16},
    DtypeFacts{Dtype::bf16, "BF16", 16},
    DtypeFacts{Dtype::i32, "I32", 32},
    DtypeFacts{Dtype::u32, "U32", 32},
    DtypeFacts{Dtype::f32, "F32", 32},
    DtypeFacts{Dtype::c64, "C64", 64},
    DtypeFacts{Dtype::f64, "F64", 64},
    DtypeFacts{Dtype::i64, "I64", 64},
    DtypeFacts{Dtype::u64, "U64", 64},
};

const DtypeFacts& facts_of(Dtype dtype) { return kDtypes.at(static_cast<std::size_t>(dtype)); }

std::unexpected<Error> refuse(const std::string& path, std::string_view why) {
  return std::unexpected(make_error(
      ErrorKind::format,
      fmt::format("{} is not a valid safetensors file: {}; it is damaged or of another format: copy, "
                  "download or save it again",
                  path, why),
      path));
}

std::unexpected<Error> cut_off(const std::string& path, std::string_view why) {
  return std::unexpected(make_error(
      ErrorKind::corrupt,
      fmt::format("{} is not a complete safetensors file: {}; it was cut off: copy or save it again", path,
                  why),
      path));
}

std::unexpected<Error> refuse_tensor(const std::string& path, std::string_view name, std::string_view why) {
  return refuse(path, fmt::format("tensor \"{}\": {}", name, why));
}

// A header needs three levels; ignored fields may nest as deeply as they like, within the reference's limit
// (128).
constexpr int kMaxDepth = 100;

// The unsigned integers of `json[key]`; nullopt if it is anything else.
std::optional<std::vector<std::uint64_t>> integers_of(const Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_array()) return std::nullopt;
  std::vector<std::uint64_t> values;
  values.reserve(found->size());
  for (const Json& value : *found) {
    if (!value.is_number_unsigned()) return std::nullopt;
    values.push_back(value.get<std::uint64_t>());
  }
  return values;
}

// Offsets are kept as in the file: relative to the data.
Result<StoredTensor> parse_tensor(const std::string& name, const Json& json, const std::string& path) {
  if (!json.is_object()) return refuse_tensor(path, name, "its description is not a JSON object");
  StoredTensor tensor{.name = name, .shape = {}};
  const auto dtype_text = json.find("dtype");
  if (dtype_text == json.end() || !dtype_text->is_string())
    return refuse_tensor(path, name, "\"dtype\" is missing or not a string");
  const auto dtype = dtype_named(dtype_text->get_ref<const std::string&>());
  if (!dtype) {
    return refuse_tensor(
        path, name, fmt::format("the dtype \"{}\" is unknown", dtype_text->get_ref<const std::string&>()));
  }
  tensor.dtype = *dtype;
  auto shape = integers_of(json, "shape");
  if (!shape) return refuse_tensor(path, name, "\"shape\" is not an array of integers from 0");
  tensor.shape = std::move(*shape);
  const auto offsets = integers_of(json, "data_offsets");
  if (!offsets || offsets->size() != 2)
    return refuse_tensor(path, name, "\"data_offsets\" is not an array of two integers from 0");
  tensor.begin = (*offsets)[0];
  tensor.end = (*offsets)[1];
  return tensor;
}

Result<Metadata> parse_metadata(const Json& json, const std::string& path) {
  if (!json.is_object()) return refuse(path, "\"__metadata__\" is not an object of strings");
  Metadata metadata;
  for (const auto& item : json.items()) {
    if (!item.value().is_string())
      return refuse(path, fmt::format("\"__metadata__\": the value of \"{}\" is not a string", item.key()));
    metadata.emplace(item.key(), item.value().get<std::string>());
  }
  return metadata;
}

// Checks that each tensor begins where the previous one ends and has the bytes of its shape, and that the
// last one ends with the file.
Status check_places(const std::vector<StoredTensor>& tensors, std::uint64_t data_bytes,
                    const std::string& path) {
  std::uint64_t covered = 0;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.begin != covered || tensor.end < tensor.begin) {
      return refuse_tensor(path, tensor.name,
                           fmt::format("its offsets {} .. {} do not continue the data at {}", tensor.begin,
                                       tensor.end, covered));
    }
    const auto bytes = tensor_bytes(tensor.dtype, tensor.shape);
    if (bytes != tensor.end - tensor.begin) {
      return refuse_tensor(
          path, tensor.name,
          fmt::format("its offsets {} .. {} do not match its shape and dtype", tensor.begin, tensor.end));
    }
    covered = tensor.end;
  }
  if (covered > data_bytes) {
    return cut_off(path,
                   fmt::format("its tensors need {} bytes, but {} follow the header", covered, data_bytes));
  }
  if (covered < data_bytes) {
    return refuse(
        path,
        fmt::format("its tensors need {} bytes, but {} follow the header; the last {} belong to no tensor",
                    covered, data_bytes, data_bytes - covered));
  }
  return {};
}

std::string encode_length(std::uint64_t value) {
  std::string bytes(kLengthBytes, '\0');
  for (char& byte : bytes) {
    byte = static_cast<char>(value & 0xFF);
    value >>= 8;
  }
  return bytes;
}

std::unexpected<Error> bad_tensor(std::string_view name, std::string_view why) {
  return std::unexpected(
      make_error(ErrorKind::invalid_argument, fmt::format("tensors: \"{}\" {}", name, why)));
}

// Indices of `tensors` in the order in which they are stored.
std::vector<std::size_t> order_of(std::span<const TensorToStore> tensors,
                                  std::span<const std::uint64_t> bytes, std::uint64_t alignment,
                                  StorageOrder storage_order) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (storage_order == StorageOrder::given) return order;
  const auto rank = [&](std::size_t index) {
    const bool aligned = bytes[index] % alignment == 0;
    return std::pair(aligned ? 0U : 1000U - bits_of(tensors[index].dtype), index);
  };
  std::ranges::sort(order, {}, rank);
  return order;
}

// Appends one header field, with the order and spacing of the reference. Throws Json::type_error where the
// name is not UTF-8.
void append_field(std::string& text, const std::string& name, const std::string& value) {
  text += text.empty() ? '{' : ',';
  text += Json(name).dump();
  text += ':';
  text += value;
}

std::string describe(const StoredTensor& tensor) {
  return fmt::format(R"({{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", name_of(tensor.dtype),
                     fmt::join(tensor.shape, ","), tensor.begin, tensor.end);
}

}  // namespace

std::string_view name_of(Dtype dtype) { return facts_of(dtype).name; }

unsigned bits_of(Dtype dtype) { return facts_of(dtype).bits; }

std::optional<Dtype> dtype_named(std::string_view name) {
  const auto found = std::ranges::find(kDtypes, name, &DtypeFacts::name);
  if (found == kDtypes.end()) return std::nullopt;
  return found->dtype;
}

std::optional<std::uint64_t> tensor_bytes(Dtype dtype, std::span<const std::uint64_t> shape) {
  std::uint64_t elements = 1;
  for (const std::uint64_t extent : shape) {
    if (__builtin_mul_overflow(elements, extent, &elements)) return std::nullopt;
  }
  std::uint64_t bits = 0;
  if (__builtin_mul_overflow(elements, std::uint64_t{bits_of(dtype)}, &bits) || bits % 8 != 0)
    return std::nullopt;
  return bits / 8;
}

Result<std::uint64_t> parse_safetensors_length(std::span<const std::byte, kLengthBytes> head,
                                               std::uint64_t file_bytes, const std::string& path) {
  std::uint64_t length = 0;
  for (std::size_t index = kLengthBytes; index > 0; --index)
    length = length << 8 | std::to_integer<std::uint64_t>(head[index - 1]);
  if (length > kMaxHeaderBytes) {
    return refuse(
        path, fmt::format("its first 8 bytes say that its header has {} bytes, and at most {} are allowed",
                          length, kMaxHeaderBytes));
  }
  if (file_bytes < kLengthBytes || length > file_bytes - kLengthBytes) {
    return cut_off(
        path, fmt::format("its header should have {} bytes, but the whole file has {}", length, file_bytes));
  }
  return length;
}

Result<SafetensorsHeader> parse_safetensors(std::string_view json, std::uint64_t file_bytes,
                                            const std::string& path) {
  if (file_bytes < kLengthBytes || json.size() > file_bytes - kLengthBytes)
    return refuse(path, "its header is longer than the file");
  // The specification requires the brace first; a parser would skip spaces and a byte order mark.
  if (!json.starts_with('{')) return refuse(path, "its header does not begin with \"{\"");
  const auto object = parse_json_object(json, kMaxDepth);
  if (!object) return refuse(path, fmt::format("its header: {}", object.error()));
  SafetensorsHeader header;
  for (const auto& item : object->items()) {
    if (item.key() == kMetadataKey) {
      auto metadata = parse_metadata(item.value(), path);
      if (!metadata) return std::unexpected(metadata.error());
      header.metadata = std::move(*metadata);
      continue;
    }
    auto tensor = parse_tensor(item.key(), item.value(), path);
    if (!tensor) return std::unexpected(tensor.error());
    header.tensors.push_back(std::move(*tensor));
  }
  std::ranges::sort(header.tensors, {}, [](const StoredTensor& tensor) {
    return std::tuple<std::uint64_t, std::uint64_t, const std::string&>(tensor.begin, tensor.end,
                                                                        tensor.name);
  });
  const std::uint64_t data_begin = kLengthBytes + json.size();
  if (auto places = check_places(header.tensors, file_bytes - data_begin, path); !places)
    return std::unexpected(places.error());
  for (StoredTensor& tensor : header.tensors) {
    tensor.begin += data_begin;
    tensor.end += data_begin;
  }
  return header;
}

Result<SafetensorsLayout> lay_out_safetensors(std::span<const TensorToStore> tensors,
                                              const Metadata& metadata, std::uint64_t alignment,
                                              StorageOrder storage_order) {
  if (!std::has_single_bit(alignment) || alignment < 8) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument,
                   fmt::format("alignment: {} is not a power of two, at least 8", alignment)));
  }
  std::set<std::string_view> names;
  std::vector<std::uint64_t> bytes;
  for (const TensorToStore& tensor : tensors) {
    if (tensor.name == kMetadataKey) return bad_tensor(tensor.name, "is reserved for the metadata");
    if (!names.insert(tensor.name).second) return bad_tensor(tensor.name, "is duplicated");
    const auto size = tensor_bytes(tensor.dtype, tensor.shape);
    if (!size) return bad_tensor(tensor.name, "has a size that is not a whole number of bytes below 2^64");
    bytes.push_back(*size);
  }

  SafetensorsLayout layout;
  layout.tensors.resize(tensors.size());
  const std::vector<std::size_t> order = order_of(tensors, bytes, alignment, storage_order);
  std::uint64_t place = 0;
  for (const std::size_t index : order) {
    const TensorToStore& tensor = tensors[index];
    StoredTensor& stored = layout.tensors[index];
    stored = {.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape, .begin = place};
    if (__builtin_add_overflow(place, bytes[index], &place)) return bad_tensor(tensor.name, "does not fit");
    stored.end = place;
  }
  std::string text;
  try {
    if (!metadata.empty()) append_field(text, std::string(kMetadataKey), Json(metadata).dump());
    for (const std::size_t index : order)
      append_field(text, tensors[index].name, describe(layout.tensors[index]));
    text += text.empty() ? "{}" : "}";
  } catch (const Json::type_error&) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument, "tensors: a name or the metadata is not valid UTF-8"));
  }
  const std::uint64_t data_begin = (kLengthBytes + text.size() + alignment - 1) / alignment * alignment;
  text.resize(data_begin - kLengthBytes, ' ');
  if (text.size() > kMaxHeaderBytes) {
    return std::unexpected(
        make_error(ErrorKind::invalid_argument,
                   fmt::format("tensors: their header has {} bytes, but the format allows {}; store them in "
                               "several files",
                               text.size(), kMaxHeaderBytes)));
  }
  if (__builtin_add_overflow(place, data_begin, &layout.file_bytes))
    return bad_tensor(tensors.back().name, "does not fit");
  layout.head = encode_length(text.size()) + text;
  for (StoredTensor& stored : layout.tensors) {
    stored.begin += data_begin;
    stored.end += data_begin;
  }
  return layout;
}

}  // namespace trunkline::format
