// Options of `trunkline bench`, and the output of fio: rejected with a typed error, or parsed.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cli/bench/fio_output.h"
#include "cli/bench/options.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace trunkline;
  const std::string_view text(reinterpret_cast<const char*>(data), bytes);
  if (const auto block = cli::parse_block_bytes(text); block && (*block == 0 || *block % 4096 != 0))
    std::abort();
  if (const auto size = cli::parse_size_bytes(text); size && *size == 0) std::abort();
  (void)cli::parse_memory(text);
  (void)cli::parse_direct(text);
  (void)cli::parse_device(text);
  (void)cli::check_peers(text);
  const auto measured = cli::parse_fio_output(text, bytes % 2 == 0 ? Op::read : Op::write);
  if (!measured && measured.error().kind != ErrorKind::format && measured.error().kind != ErrorKind::system)
    std::abort();
  return 0;
}
