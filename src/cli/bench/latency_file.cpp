#include "cli/bench/latency_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <iterator>

#include "base/creation_error.h"
#include "os/environment.h"

namespace trunkline::cli {

std::uint64_t exact_percentile(const std::vector<std::uint64_t>& sorted, double percent) {
  if (sorted.empty()) return 0;
  const auto rank = static_cast<std::size_t>(std::ceil(percent / 100 * static_cast<double>(sorted.size())));
  return sorted[std::clamp<std::size_t>(rank, 1, sorted.size()) - 1];
}

Result<LatencyFile> LatencyFile::create(const std::string& path) {
  std::ofstream file(path, std::ios::trunc);
  if (!file) {
    const std::string directory = std::filesystem::path(path).parent_path().string();
    return std::unexpected(creation_error(errno, "open --log " + path, path, directory));
  }
  file << "row,run,time_us,latency_us,operation,offset,bytes\n";
  return LatencyFile(path, std::move(file));
}

std::size_t LatencyFile::most_transfers() {
  // A quarter of the memory, and what is left for the latencies of other runs and for sorting.
  return os::free_memory_bytes() / 4 / sizeof(io::LatencyRecord);
}

Status LatencyFile::add(const std::string& row, unsigned run, const std::vector<io::LatencyLog>& logs,
                        Latencies& latencies) {
  std::vector<const io::LatencyRecord*> records;
  for (const io::LatencyLog& log : logs) {
    if (log.dropped() > 0) {
      return std::unexpected(make_error(
          ErrorKind::unsupported,
          fmt::format("--log {}: {} has more transfers than fit in memory; choose a smaller --size or "
                      "--duration, or larger blocks",
                      path_, row),
          path_));
    }
    for (const auto& piece : log.pieces()) {
      for (const io::LatencyRecord& record : piece) records.push_back(&record);
    }
  }
  std::ranges::sort(records, {}, &io::LatencyRecord::submitted_ns);
  std::string lines;
  constexpr std::size_t kFlushBytes = 1 << 20;
  for (const io::LatencyRecord* record : records) {
    const bool reads = record->op == Op::read;
    (reads ? latencies.reads : latencies.writes).push_back(record->took_ns);
    const std::uint64_t since_ns = record->submitted_ns - records.front()->submitted_ns;
    fmt::format_to(std::back_inserter(lines), "{},{},{}.{:03},{}.{:03},{},{},{}\n", row, run, since_ns / 1000,
                   since_ns % 1000, record->took_ns / 1000, record->took_ns % 1000, reads ? "read" : "write",
                   record->offset, record->bytes);
    if (lines.size() < kFlushBytes) continue;
    file_ << lines;
    lines.clear();
  }
  file_ << lines << std::flush;
  if (!file_) return std::unexpected(system_error(errno, "write the latencies to " + path_, path_));
  return {};
}

}  // namespace trunkline::cli
