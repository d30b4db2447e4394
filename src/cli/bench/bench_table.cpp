#include "cli/bench/bench_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "cli/text_table.h"
#include "trunkline/units.h"

namespace trunkline::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string text(const Json& value) { return value.get<std::string>(); }

// "412 us", "3.1 ms"
std::string duration(double us) {
  if (us < 1000) return fmt::format("{:.0f} us", us);
  if (us < 1e6) return fmt::format("{:.1f} ms", us / 1e3);
  return fmt::format("{:.2f} s", us / 1e6);
}

std::string number(const Json& row, const char* name, int digits) {
  return row.contains(name) ? fmt::format("{:.{}f}", row[name].get<double>(), digits) : "";
}

// "1 MiB", or "4 KiB to 64 KiB"
std::string block_sizes(const Json& document) {
  const Json& least = document["options"]["least_block_bytes"];
  const std::string most = format_size(document["engine"]["block_bytes"].get<std::uint64_t>());
  return least.is_null() ? most : fmt::format("{} to {}", format_size(least.get<std::uint64_t>()), most);
}

std::string header(const Json& document) {
  const Json& engine = document["engine"];
  const Json& options = document["options"];
  std::string result = fmt::format(
      "{}, {} lane{}, queue depth {}, {} blocks, {}, {} memory{}, median of {}\n", text(engine["backend"]),
      engine["lanes"].get<unsigned>(), engine["lanes"] == 1 ? "" : "s", engine["queue_depth"].get<unsigned>(),
      block_sizes(document), text(options["order"]), text(options["memory"]),
      options["device"] == "cpu" ? "" : " of " + text(options["device"]), options["repeat"].get<unsigned>());
  for (const Json& path : document["paths"]) {
    const Json& explain = path["explain"];
    const bool as_asked = options["direct"] != "auto";
    result += fmt::format(
        "{}: {} x {}, {} on {}, {}\n", text(path["path"]), path["files"].size(),
        format_size(path["file_bytes"].get<std::uint64_t>()), text(explain["filesystem"]),
        text(explain["device"]),
        as_asked ? fmt::format("--direct {}", text(options["direct"]))
                 : fmt::format("{}: {}", explain["direct"].get<bool>() ? "direct I/O" : "page cache",
                               text(explain["why"])));
  }
  return result;
}

std::string io_paths(const Json& row) {
  std::string result;
  const Json& bytes = row["bytes_by_path"];
  double total = 0;
  for (const auto& [path, moved] : bytes.items()) total += moved.get<double>();
  for (const auto& [path, moved] : bytes.items()) {
    if (moved == 0) continue;
    if (!result.empty()) result += ", ";
    result += fmt::format("{} {:.0f}%", path, 100 * moved.get<double>() / total);
  }
  return result;
}

// A few blocks say how long one read or write takes, and nothing of the throughput.
std::string too_few_blocks(const Json& document) {
  constexpr std::uint64_t kFewestBlocks = 32;
  const auto block_bytes = document["engine"]["block_bytes"].get<std::uint64_t>();
  std::uint64_t bytes = 0;
  for (const Json& path : document["paths"])
    bytes += path["file_bytes"].get<std::uint64_t>() * path["files"].size();
  if (bytes >= kFewestBlocks * block_bytes) return "";
  return fmt::format(
      "\nonly {} in blocks of {}: too little to measure throughput; use a larger file or --size\n",
      format_bytes(bytes), format_size(block_bytes));
}

std::string per_path(const Json& document) {
  if (document["paths"].size() < 2) return "";
  std::vector<std::string> names{""};
  for (const Json& row : document["results"]) names.push_back(text(row["name"]));
  TextTable table(names);
  for (std::size_t path = 0; path < document["paths"].size(); ++path) {
    std::vector<std::string> line{text(document["paths"][path]["path"])};
    for (const Json& row : document["results"]) {
      line.push_back(fmt::format("{:.2f}", row["runs"][0]["per_path"][path]["gb_s"].get<double>()));
    }
    table.add(line);
  }
  return fmt::format("\nGB/s of each path, first run\n{}", table.render());
}

// The columns up to the I/O path; empty where the row does not have them.
std::vector<std::string> line_of(std::string name, const Json& row) {
  std::vector<std::string> line{std::move(name), number(row, "gb_s", 2), number(row, "gb_s_with_sync", 2),
                                number(row, "iops", 0), number(row, "cpu_s_per_gb", 3)};
  for (const char* percentile : {"p50", "p99", "p99.9", "max"})
    line.push_back(duration(row["latency_us"][percentile].get<double>()));
  return line;
}

void append_fio(std::vector<std::string>& line, const Json& fio) {
  line.push_back(number(fio, fio.contains("gb_s") ? "gb_s" : "gb_s_with_sync", 2));
  line.push_back(number(fio, "ratio_gb_s", 3));
  line.push_back(number(fio, "iops", 0));
  line.push_back(number(fio, "cpu_s_per_gb", 3));
  line.push_back(number(fio, "ratio_cpu_s_per_gb", 2));
}

}  // namespace

std::string bench_table(const Json& document) {
  const bool fio = document.contains("fio");
  const bool gdsio = document.contains("gdsio");
  std::vector<std::string> names{"",    "GB/s", "with fsync", "IOPS", "CPU s/GB",
                                 "p50", "p99",  "p99.9",      "max",  "I/O path"};
  if (fio) names.insert(names.end(), {"fio GB/s", "ratio", "fio IOPS", "fio CPU s/GB", "ratio"});
  if (gdsio) names.insert(names.end(), {"gdsio GB/s", "ratio", "gdsio IOPS"});
  TextTable table(names);
  for (const Json& row : document["results"]) {
    std::vector<std::string> line = line_of(text(row["name"]), row);
    line.push_back(io_paths(row));
    if (row.contains("fio")) append_fio(line, row["fio"]);
    if (row.contains("gdsio")) {
      for (const auto& [name, digits] : {std::pair{"gb_s", 2}, {"ratio_gb_s", 3}, {"iops", 0}})
        line.push_back(number(row["gdsio"], name, digits));
    }
    table.add(line);
    for (const char* part : {"reads", "writes"}) {
      if (!row.contains(part)) continue;
      line = line_of(fmt::format("  {}", part), row[part]);
      line.resize(names.size());
      table.add(line);
    }
  }
  std::string result = fmt::format("{}\n{}{}{}", header(document), table.render(), too_few_blocks(document),
                                   per_path(document));
  if (fio)
    result += fmt::format("\n{}: {}\n", text(document["fio"]["version"]), text(document["fio"]["terms"]));
  if (gdsio) result += fmt::format("\ngdsio: {}\n", text(document["gdsio"]["terms"]));
  if (document["options"]["verify"].get<bool>())
    result += "\nverified: every byte read and written is correct\n";
  return result;
}

}  // namespace trunkline::cli
