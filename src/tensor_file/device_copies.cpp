#include "tensor_file/device_copies.h"

#include <algorithm>
#include <utility>

namespace trunkline::tensor_file {

Device* device_of(const FileLayout& layout, const Block& block) {
  for (const Extent& extent : extents_in(layout, block.offset, block.end())) {
    if (!is_host(extent.memory)) return extent.memory.device;
  }
  return nullptr;
}

void DeviceCopies::start(const FileLayout& layout, const Block& block, std::byte* staged, Direction direction,
                         Done done) {
  std::vector<std::pair<Device*, Copy>> copies;
  for (const Extent& extent : extents_in(layout, block.offset, block.end())) {
    if (is_host(extent.memory)) continue;
    const std::uint64_t begin = std::max(extent.offset, block.offset);
    copies.emplace_back(extent.memory.device, Copy{.direction = direction,
                                                   .host = staged + (begin - block.offset),
                                                   .device = extent.memory.data + (begin - extent.offset),
                                                   .bytes = std::min(extent.end(), block.end()) - begin,
                                                   .after = extent.after});
  }
  std::uint32_t tag = 0;
  {
    const std::scoped_lock lock(jobs_mutex_);
    tag = next_tag_++;
    jobs_[tag] = {.left = copies.size(), .done = std::move(done), .error = {}};
  }
  const std::scoped_lock lock(queues_mutex_);
  for (auto& [device, copy] : copies) {
    copy.tag = tag;
    if (auto queue = queue_of(*device)) {
      (*queue)->start(std::move(copy));
    } else {
      ended({{.tag = tag, .error = queue.error()}});
    }
  }
  for (const Queue& queue : queues_) queue.copies->send();
}

Result<CopyQueue*> DeviceCopies::queue_of(Device& device) {
  for (const Queue& queue : queues_) {
    if (queue.device == &device) return queue.copies.get();
  }
  Queue& queue = queues_.emplace_back();
  auto opened = device.open_queue([this, &queue] {
    std::vector<CopyQueue::Ended> copies;
    queue.copies->take(copies);
    ended(copies);
  });
  if (!opened) {
    queues_.pop_back();
    return std::unexpected(opened.error());
  }
  queue = {.device = &device, .copies = std::move(*opened)};
  return queue.copies.get();
}

void DeviceCopies::ended(const std::vector<CopyQueue::Ended>& copies) {
  for (const CopyQueue::Ended& copy : copies) {
    Job over;
    {
      const std::scoped_lock lock(jobs_mutex_);
      const auto job = jobs_.find(copy.tag);
      if (!job->second.error) job->second.error = copy.error;
      if (--job->second.left > 0) continue;
      over = std::move(job->second);
      jobs_.erase(job);
    }
    over.done(over.error ? Status(std::unexpected(*over.error)) : Status());
  }
}

}  // namespace trunkline::tensor_file
