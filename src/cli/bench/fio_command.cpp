#include "cli/bench/fio_command.h"

#include <fmt/format.h>

#include <algorithm>

namespace trunkline::cli {
namespace {

constexpr unsigned kThreadsPerLane = 16;  // at most, with the threads backend (src/io/backends/threads.cpp)

// fio separates several file names by colons, so a colon in a name must be escaped.
std::string file_list(const std::vector<std::string>& files) {
  std::string list;
  for (const std::string& file : files) {
    if (!list.empty()) list += ':';
    for (const char letter : file) {
      if (letter == ':' || letter == '\\') list += '\\';
      list += letter;
    }
  }
  return list;
}

std::string io_engine(BackendKind backend) {
  switch (backend) {
    case BackendKind::io_uring:
      return "io_uring";
    case BackendKind::libaio:
      return "libaio";
    default:
      return "psync";
  }
}

struct InFlight {
  unsigned jobs;
  unsigned depth;
};

InFlight in_flight(const FioJob& job) {
  InFlight wanted{job.lanes, job.queue_depth};
  if (io_engine(job.backend) == "psync") wanted = {job.lanes * std::min(job.queue_depth, kThreadsPerLane), 1};
  const std::uint64_t blocks = std::max<std::uint64_t>(1, job.file_bytes / job.block_bytes);
  wanted.jobs = static_cast<unsigned>(std::min<std::uint64_t>(wanted.jobs, blocks));
  return wanted;
}

std::string_view direction(const Case& what) {
  if (what.read_percent) return "rw";
  return what.writes() ? "write" : "read";
}

bool has_block_range(const FioJob& job) {
  return job.least_block_bytes != 0 && job.least_block_bytes < job.block_bytes;
}

bool is_time_based(const FioJob& job) {
  return job.duration_s > 0 && (job.what.op == Op::read || job.what.write_mode == WriteMode::overwrite);
}

}  // namespace

std::vector<std::string> fio_command(const FioJob& job) {
  const InFlight shared = in_flight(job);
  std::vector<std::string> command;
  // The buffers that fio allocates with malloc are scattered 4 KiB pages unless glibc uses huge ones; a
  // transfer then needs hundreds of segments, which costs some devices more than half of their bandwidth.
  // (--iomem=mmaphuge needs reserved pages.)
  if (job.huge_pages) command = {"env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"};
  command.insert(command.end(),
                 {"fio", "--output-format=json", "--eta=never", "--name=global", "--thread=1"});
  const auto set = [&](std::string_view name, const auto& value) {
    command.push_back(fmt::format("--{}={}", name, value));
  };
  set("filename", file_list(job.files));
  set("ioengine", io_engine(job.backend));
  set("rw", fmt::format("{}{}", job.order == Order::random ? "rand" : "", direction(job.what)));
  if (job.what.read_percent) set("rwmixread", *job.what.read_percent);
  if (has_block_range(job)) {
    set("bsrange", fmt::format("{}-{}", job.least_block_bytes, job.block_bytes));
  } else {
    set("bs", job.block_bytes);
  }
  if (job.seed) set("randseed", *job.seed);
  set("iodepth", shared.depth);
  set("direct", job.direct ? 1 : 0);
  set("scramble_buffers", 0);  // our memory does not change between transfers either
  if (job.what.writes()) {
    set("end_fsync", 1);
    set("fallocate", "none");
    if (job.what.write_mode != WriteMode::fresh)
      set("overwrite", 1);  // keeps the prepared file from being truncated
  }
  if (is_time_based(job)) {
    set("time_based", 1);
    set("runtime", fmt::format("{}ms", static_cast<std::uint64_t>(1000 * job.duration_s)));
  }
  // Shares are whole blocks; the last job also gets the remainder.
  const std::uint64_t blocks = job.file_bytes / job.block_bytes;
  for (unsigned index = 0; index < shared.jobs; ++index) {
    const std::uint64_t begin = blocks * index / shared.jobs;
    const std::uint64_t end = blocks * (index + 1) / shared.jobs;
    set("name", fmt::format("lane{}", index));
    set("offset", begin * job.block_bytes);
    set("size", (end - begin) * job.block_bytes * job.files.size());
  }
  return command;
}

std::string fio_terms(const FioJob& job) {
  const InFlight shared = in_flight(job);
  std::string blocks = fmt::format("blocks of {} bytes", job.block_bytes);
  if (has_block_range(job)) {
    blocks = fmt::format("blocks of {} to {} bytes", job.least_block_bytes, job.block_bytes);
    if (job.order == Order::random)
      blocks += " (fio cuts a block short where the next one was already transferred in this pass)";
  }
  if (job.what.read_percent) blocks += fmt::format(", {}% of them read", *job.what.read_percent);
  return fmt::format(
      "fio ran {} job{} (threads) with ioengine {}, iodepth {}, {}, direct={}, page-aligned memory{}. Its "
      "writes end with fsync, which its bandwidth includes, and are compared with ours with "
      "fsync. Its CPU time is that of its jobs, ours also contains the kernel's workers, which write new "
      "blocks for both.",
      shared.jobs, shared.jobs == 1 ? "" : "s", io_engine(job.backend), shared.depth, blocks,
      job.direct ? 1 : 0, job.huge_pages ? " on transparent huge pages" : " on ordinary pages");
}

}  // namespace trunkline::cli
