// The options of `trunkline bench`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/bench/schedule.h"
#include "trunkline/engine.h"
#include "trunkline/file.h"
#include "trunkline/units.h"

namespace trunkline::cli {

enum class WriteMode {
  fresh,         // a file that did not exist
  preallocated,  // blocks reserved (posix_fallocate), never written
  overwrite,     // blocks that hold data
};
std::string_view to_string(WriteMode mode);
Result<std::vector<WriteMode>> parse_write_modes(
    std::string_view list);  // "fresh,overwrite"; no duplicates, order kept

enum class MemoryKind {
  aligned,   // page-aligned memory of the engine
  ordinary,  // 64 bytes past a page, where torch puts large CPU tensors: bounced where the device requires
             // 512
};
std::string_view to_string(MemoryKind kind);

std::string_view to_string(Direct direct);
std::string_view to_string(Order order);
std::string device_name(const std::optional<unsigned>& cuda);  // "cpu", "cuda:1"

struct BlockRange {
  std::uint64_t least_bytes = 0;
  std::uint64_t most_bytes = 0;  // a multiple of least_bytes
};

struct BenchOptions {
  std::vector<std::string> paths;
  bool read = false;  // neither given: both, or only reading when a path is an existing file
  bool write = false;
  std::optional<std::uint64_t> size_bytes;         // of each file; new files: 1 GB; existing ones: their size
  std::uint64_t block_bytes = kMiB;                // the largest of a range
  std::optional<std::uint64_t> least_block_bytes;  // of a range of sizes
  std::optional<unsigned> mix;                     // percent of transfers that read; the others write
  std::optional<std::uint64_t> seed;
  std::optional<unsigned> queue_depth;
  std::optional<unsigned> lanes;
  BackendKind backend = BackendKind::automatic;
  double duration_s = 0;  // 0: one pass over the files
  bool random = false;
  unsigned files = 1;  // in each directory
  bool verify = false;
  unsigned repeat = 3;
  MemoryKind memory = MemoryKind::aligned;
  std::optional<unsigned> cuda;  // the GPU whose memory is used; nullopt: host memory
  Direct direct = Direct::automatic;
  std::vector<WriteMode> write_modes{WriteMode::fresh, WriteMode::preallocated, WriteMode::overwrite};
  bool compare_fio = false;
  bool compare_gdsio = false;
  std::string log;     // a file for the latency of each transfer; empty: none
  std::string trace;   // a file for a trace of the measurements; empty: none
  std::string output;  // a file that the JSON is also written to; empty: none
  bool json = false;
  bool keep = false;

  Order order() const { return random ? Order::random : Order::sequential; }
  bool writes() const { return write || mix; }
};

// Parsers for options that are more than a number; messages name the option.
Result<MemoryKind> parse_memory(std::string_view text);
Result<Direct> parse_direct(std::string_view text);
Result<BackendKind> parse_bench_backend(std::string_view text);       // those that move bytes to a file
Result<std::optional<unsigned>> parse_device(std::string_view text);  // "cpu", "cuda", "cuda:1"
struct Peers {
  bool fio = false;
  bool gdsio = false;
};
Result<Peers> parse_peers(std::string_view list);               // "fio", "gdsio", "fio,gdsio"
Result<std::uint64_t> parse_size_bytes(std::string_view text);  // more than 0
Result<BlockRange> parse_block_range(std::string_view text);    // "1MiB", or "4KiB-64KiB"
Result<double> parse_duration(std::string_view text);           // seconds, up to a day

}  // namespace trunkline::cli
