// Options of `trunkline bench`, and the output of fio: rejected with a typed error, or parsed.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cli/bench/fio_output.h"
#include "cli/bench/options.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace trunkline;
  const std::string_view text(reinterpret_cast<const char*>(data), bytes);
  if (const auto block = cli::parse_block_range(text);
      block && (block->least_bytes == 0 || block->least_bytes % 4096 != 0 ||
                block->most_bytes < block->least_bytes || block->most_bytes % block->least_bytes != 0))
    std::abort();
  if (const auto size = cli::parse_size_bytes(text); size && *size == 0) std::abort();
  (void)cli::parse_memory(text);
  (void)cli::parse_direct(text);
  (void)cli::parse_device(text);
  (void)cli::parse_peers(text);
  const cli::Case cases[] = {{.op = Op::read}, {.op = Op::write}, {.op = Op::write, .read_percent = 70}};
  const auto measured = cli::parse_fio_output(text, cases[bytes % 3]);
  if (!measured && measured.error().kind != ErrorKind::format && measured.error().kind != ErrorKind::system)
    std::abort();
  return 0;
}
