// Names in a directory of checkpoints: each number has exactly one name, and the name of a file that may be
// removed never leads out of the directory.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/manifest.h"
#include "checkpoint/names.h"
#include "os/temporary_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace trunkline::checkpoint;
  const std::string_view name(reinterpret_cast<const char*>(data), bytes);
  if (const auto step = step_of(name); step && step_directory(*step) != name) std::abort();
  if (const auto commit = commit_of(name); commit && (*commit == 0 || manifest_file(*commit) != name))
    std::abort();
  if (is_shard_file(name) && (!is_plain_file_name(name) || trunkline::os::is_temporary_name(name)))
    std::abort();
  if (is_shard_file(name) && (step_of(name) || commit_of(name) || is_aside_directory(name))) std::abort();
  if (is_aside_directory(name) && !is_plain_file_name(name)) std::abort();
  if (bytes >= sizeof(std::uint64_t)) {
    std::uint64_t number = 0;
    for (std::size_t i = 0; i < sizeof number; ++i) number = number << 8 | data[i];
    number >>= 1;
    if (step_of(step_directory(number)) != number) std::abort();
    if (number > 0 && commit_of(manifest_file(number)) != number) std::abort();
    if (!is_shard_file(shard_file(number % 100'000, number, "0123456789abcdef"))) std::abort();
  }
  return 0;
}
