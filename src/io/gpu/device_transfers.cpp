#include "io/gpu/device_transfers.h"

#include <algorithm>

#include "io/file/file_core.h"
#include "io/lane/bounce.h"
#include "io/operation.h"

namespace trunkline::io {
namespace {

template <class Queues>
auto* queue_of(const Queues& queues, const Device& device) {
  const auto found = std::ranges::find_if(queues, [&](const auto& each) { return each.first == &device; });
  return found == queues.end() ? nullptr : found->second.get();
}

}  // namespace

Status DeviceTransfers::prepare_copy(Device& device, std::span<std::byte> slots) {
  if (queue_of(copy_queues_, device) != nullptr) return {};
  auto opened = device.open_queue(wake_);
  if (!opened) return std::unexpected(opened.error());
  if (pin_ == nullptr) {
    auto pinned = device.pin(slots);
    if (pinned)
      pin_ = std::move(*pinned);
    else
      refusals_.note(Refused::pinned_buffers, pinned.error());
  }
  copy_queues_.emplace_back(&device, std::move(*opened));
  return {};
}

Status DeviceTransfers::prepare_gds(Device& device) {
  if (queue_of(gds_queues_, device) != nullptr) return {};
  auto opened = device.open_gds_queue(wake_);
  if (!opened) return std::unexpected(opened.error());
  gds_queues_.emplace_back(&device, std::move(*opened));
  return {};
}

void DeviceTransfers::start_copy(const Transfer& transfer, std::uint32_t tag) {
  ++under_way_;
  queue_of(copy_queues_, *transfer.operation->memory().device)
      ->start({.direction = transfer.op == Op::read ? Direction::from_host : Direction::to_host,
               .host = payload(transfer),
               .device = transfer.memory,
               .bytes = transfer.piece.length,
               .after = transfer.operation->fence(),
               .tag = tag});
}

void DeviceTransfers::start_gds(const Transfer& transfer, std::uint32_t tag) {
  ++under_way_;
  queue_of(gds_queues_, *transfer.operation->memory().device)
      ->start({.to_file = transfer.op == Op::write,
               .file = transfer.member->gds,
               .offset = transfer.piece.offset,
               .device = transfer.memory,
               .bytes = transfer.piece.length,
               .after = transfer.operation->fence(),
               .tag = tag});
}

void DeviceTransfers::send() {
  for (const auto& [device, queue] : copy_queues_) queue->send();
  for (const auto& [device, queue] : gds_queues_) queue->send();
}

std::vector<CopyQueue::Completion> DeviceTransfers::take_copies() {
  std::vector<CopyQueue::Completion> completions;
  for (const auto& [device, queue] : copy_queues_) queue->take(completions);
  under_way_ -= static_cast<unsigned>(completions.size());
  return completions;
}

std::vector<GdsQueue::Completion> DeviceTransfers::take_gds() {
  std::vector<GdsQueue::Completion> completions;
  for (const auto& [device, queue] : gds_queues_) queue->take(completions);
  under_way_ -= static_cast<unsigned>(completions.size());
  return completions;
}

}  // namespace trunkline::io
