// Loads all weights of a model, with all reads in flight at once and checksums verified where the files have
// them.   load_model PATH   (a safetensors file, a model's directory, or a step of a directory of
// checkpoints)
#include <cstdio>
#include <vector>

#include "trunkline/trunkline.h"

namespace tl = trunkline;

namespace {

tl::Status load(const std::string& path) {
  auto engine = tl::Engine::create({.paths = {path}});
  if (!engine) return std::unexpected(engine.error());
  auto model = tl::TensorReader::open(*engine, path);
  if (!model) return std::unexpected(model.error());

  std::vector<tl::Buffer> weights;  // page-aligned; yours may be anywhere, also on a GPU
  std::vector<tl::TensorRead> reads;
  for (const tl::TensorInfo& tensor : model->tensors()) {
    auto memory = tl::Buffer::allocate_pageable(tensor.bytes);
    if (!memory) return std::unexpected(memory.error());
    reads.push_back({tensor.name, memory->span()});
    weights.push_back(std::move(*memory));
  }
  if (auto status = model->read(reads); !status) return status;

  for (std::size_t i = 0; i < reads.size(); ++i) {
    const tl::TensorInfo& tensor = model->tensors()[i];
    std::printf("%s %s %llu %08x\n", tensor.name.c_str(), tensor.dtype.c_str(),
                static_cast<unsigned long long>(tensor.bytes), tl::crc32c(weights[i].span()));
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: load_model PATH\n");
    return 2;
  }
  const tl::Status status = load(argv[1]);
  if (!status) std::fprintf(stderr, "load_model: %s\n", status.error().message.c_str());
  return status ? 0 : 1;
}
