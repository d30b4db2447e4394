#include "cli/checkpoint/checkpoint_output.h"

#include <fmt/format.h>

#include <cerrno>
#include <iostream>

#include "checkpoint/verify.h"
#include "cli/engine_json.h"
#include "cli/exit_code.h"

namespace trunkline::cli {

using Json = nlohmann::ordered_json;

Result<std::unique_ptr<checkpoint::Store>> open_store(const CheckpointArguments& arguments) {
  return checkpoint::Store::open(arguments.directory, {.if_missing = checkpoint::IfMissing::fail});
}

Error no_checkpoint(const checkpoint::Store& store) {
  return make_error(ErrorKind::system, store.directory() + " has no checkpoint yet", store.directory());
}

Result<std::uint64_t> chosen_step(const checkpoint::Store& store, const CheckpointArguments& arguments) {
  if (arguments.step) return *arguments.step;
  const auto latest = store.latest();
  if (!latest) return std::unexpected(latest.error());
  if (const auto& step = *latest) return *step;
  return std::unexpected(no_checkpoint(store));
}

Json document_of(std::string_view command, const CheckpointArguments& arguments) {
  return {
      {"command", fmt::format("checkpoint {}", command)}, {"schema", 1}, {"directory", arguments.directory}};
}

// Invalid UTF-8 in file names (names in manifests are valid) is replaced rather than rejected.
std::string dump(const Json& document) {
  return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

int print(const CheckpointArguments& arguments, const Json& document, const std::string& text, bool ok) {
  std::cout << (arguments.json ? dump(document) : text) << std::flush;
  return ok && std::cout ? kExitOk : kExitFailed;
}

double written_share(const checkpoint::Manifest& manifest) {
  const std::uint64_t bytes = checkpoint::bytes_to_verify(manifest);
  const std::uint64_t written = checkpoint::bytes_written(manifest);
  return bytes == 0 ? 1 : static_cast<double>(written) / static_cast<double>(bytes);
}

void print_problem(std::string_view command, std::string_view message) {
  std::cerr << "trunkline checkpoint " << command << ": " << printable(message) << '\n';
}

int fail(const CheckpointArguments& arguments, std::string_view command, const Error& error) {
  if (arguments.json) {
    Json document = document_of(command, arguments);
    document["error"] = error_json(error);
    std::cout << dump(document) << std::flush;
  }
  print_problem(command, error.message);
  const bool usage =
      error.kind == ErrorKind::invalid_argument || error.code == ENOENT || error.code == ENOTDIR;
  return usage ? kExitUsage : kExitFailed;
}

std::string printable(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = '?';
  }
  return result;
}

}  // namespace trunkline::cli
