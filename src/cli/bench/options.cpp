#include "cli/bench/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string>
#include <system_error>

#include "base/invalid_argument.h"
#include "cli/seconds.h"

namespace trunkline::cli {
namespace {

constexpr std::uint64_t kBlockUnit = 4096;

std::vector<std::string_view> split(std::string_view list) {
  std::vector<std::string_view> words;
  while (true) {
    const auto comma = list.find(',');
    words.push_back(list.substr(0, comma));
    if (comma == std::string_view::npos) return words;
    list.remove_prefix(comma + 1);
  }
}

// A multiple of 4096, up to 1 GiB.
Result<std::uint64_t> parse_block_bytes(std::string_view text) {
  const auto bytes = parse_bytes(text);
  if (!bytes) return invalid_argument("--block-bytes: " + bytes.error().message);
  if (*bytes == 0 || *bytes % kBlockUnit != 0 || *bytes > kGiB) {
    return invalid_argument(
        fmt::format("--block-bytes: must be a multiple of 4096 from 4 KiB to 1 GiB, not {}", text));
  }
  return *bytes;
}

}  // namespace

std::string_view to_string(WriteMode mode) {
  switch (mode) {
    case WriteMode::fresh:
      return "fresh";
    case WriteMode::preallocated:
      return "preallocated";
    case WriteMode::overwrite:
      break;
  }
  return "overwrite";
}

std::string_view to_string(MemoryKind kind) { return kind == MemoryKind::aligned ? "aligned" : "ordinary"; }

std::string_view to_string(Direct direct) {
  switch (direct) {
    case Direct::automatic:
      return "auto";
    case Direct::always:
      return "always";
    case Direct::unless_cached:
      return "unless_cached";
    case Direct::never:
      break;
  }
  return "never";
}

std::string device_name(const std::optional<unsigned>& cuda) {
  return cuda ? fmt::format("cuda:{}", *cuda) : "cpu";
}

std::string_view to_string(Order order) { return order == Order::random ? "random" : "sequential"; }

Result<std::vector<WriteMode>> parse_write_modes(std::string_view list) {
  std::vector<WriteMode> modes;
  for (const std::string_view word : split(list)) {
    const WriteMode known[] = {WriteMode::fresh, WriteMode::preallocated, WriteMode::overwrite};
    const auto* const mode = std::ranges::find(known, word, [](WriteMode each) { return to_string(each); });
    if (mode == std::end(known)) {
      return invalid_argument(
          fmt::format("--write-mode: \"{}\" is not one of fresh, preallocated, overwrite", word));
    }
    if (std::ranges::find(modes, *mode) != modes.end()) {
      return invalid_argument(fmt::format("--write-mode: {} is duplicated", word));
    }
    modes.push_back(*mode);
  }
  return modes;
}

Result<MemoryKind> parse_memory(std::string_view text) {
  if (text == "aligned") return MemoryKind::aligned;
  if (text == "ordinary") return MemoryKind::ordinary;
  return invalid_argument(fmt::format("--memory: \"{}\" is not one of aligned, ordinary", text));
}

Result<Direct> parse_direct(std::string_view text) {
  for (const Direct direct : {Direct::automatic, Direct::always, Direct::never}) {
    if (text == to_string(direct)) return direct;
  }
  return invalid_argument(fmt::format("--direct: \"{}\" is not one of auto, always, never", text));
}

Result<std::optional<unsigned>> parse_device(std::string_view text) {
  if (text == "cpu") return std::nullopt;
  if (text == "cuda") return 0U;
  constexpr std::string_view kCuda = "cuda:";
  unsigned ordinal = 0;
  if (text.starts_with(kCuda)) {
    const std::string digits(text.substr(kCuda.size()));
    const char* const end = digits.data() + digits.size();
    const auto [parsed, code] = std::from_chars(digits.data(), end, ordinal);
    if (code == std::errc() && parsed == end) return ordinal;
  }
  return invalid_argument(fmt::format("--device: \"{}\" is not one of cpu, cuda, cuda:0, cuda:1, ...", text));
}

Result<BackendKind> parse_bench_backend(std::string_view text) {
  constexpr std::string_view kNames = "auto, io_uring, libaio, threads";
  const auto backend = parse_backend(text);
  if (!backend) return invalid_argument(fmt::format("--backend: \"{}\" is not one of {}", text, kNames));
  if (*backend == BackendKind::memory)
    return invalid_argument(fmt::format(
        "--backend: memory keeps files in this process and reaches no disk; use one of {}", kNames));
  return *backend;
}

Result<Peers> parse_peers(std::string_view list) {
  Peers peers;
  for (const std::string_view name : split(list)) {
    if (name != "fio" && name != "gdsio")
      return invalid_argument(fmt::format("--compare: \"{}\" is not one of fio, gdsio", name));
    bool& peer = name == "fio" ? peers.fio : peers.gdsio;
    if (peer) return invalid_argument(fmt::format("--compare: {} is duplicated", name));
    peer = true;
  }
  return peers;
}

Result<std::uint64_t> parse_size_bytes(std::string_view text) {
  const auto bytes = parse_bytes(text);
  if (!bytes) return invalid_argument("--size: " + bytes.error().message);
  if (*bytes == 0) return invalid_argument("--size: must be more than 0 bytes");
  return *bytes;
}

Result<BlockRange> parse_block_range(std::string_view text) {
  const auto dash = text.find('-', 1);  // a leading one is a sign
  const auto least = parse_block_bytes(text.substr(0, dash));
  if (!least) return std::unexpected(least.error());
  if (dash == std::string_view::npos) return BlockRange{*least, *least};
  const auto most = parse_block_bytes(text.substr(dash + 1));
  if (!most) return std::unexpected(most.error());
  if (*most <= *least || *most % *least != 0) {
    return invalid_argument(fmt::format(
        "--block-bytes: the second size of {} must be a multiple of the first, as in 4KiB-64KiB", text));
  }
  return BlockRange{*least, *most};
}

Result<double> parse_duration(std::string_view text) {
  constexpr double kDay = 86'400;
  const auto seconds = parse_seconds("--duration", text);
  if (seconds && *seconds > kDay)
    return invalid_argument("--duration: must be at most 24h, not " + std::string(text));
  return seconds;
}

}  // namespace trunkline::cli
