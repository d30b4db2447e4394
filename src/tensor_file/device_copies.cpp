#include "tensor_file/device_copies.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace trunkline::tensor_file {
namespace {

constexpr trace::Kind kToDevice{"copy to the GPU", trace::Category::copy, trace::Kind::Fields::bytes};
constexpr trace::Kind kFromDevice{"copy from the GPU", trace::Category::copy, trace::Kind::Fields::bytes};

}  // namespace

CopyTrace::CopyTrace(const FileLayout& layout, Direction direction)
    : start_ns_(trace::start()), direction_(direction), layout_(&layout) {}

void CopyTrace::add(const Device& device, std::uint64_t bytes) {
  if (start_ns_ == 0) return;
  auto part = std::ranges::find(parts_, &device, &Part::device);
  if (part == parts_.end()) part = parts_.insert(part, {.device = &device});
  part->bytes += bytes;
}

void CopyTrace::end(const std::optional<Error>& error) const {
  for (const Part& part : parts_) {
    trace::record({.kind = direction_ == Direction::from_host ? &kToDevice : &kFromDevice,
                   .start_ns = start_ns_,
                   .end_ns = trace::now(),
                   .text = trace::intern(layout_->path),
                   .device = trace::intern(part.device->name()),
                   .bytes = error ? 0 : part.bytes,
                   .result = error ? -EIO : 0});
  }
}

Device* device_of(const FileLayout& layout, const Block& block) {
  for (const Extent& extent : extents_in(layout, block.offset, block.end())) {
    if (!is_host(extent.memory)) return extent.memory.device;
  }
  return nullptr;
}

void DeviceCopies::start(const FileLayout& layout, const Block& block, std::byte* staged, Direction direction,
                         Done done) {
  std::vector<std::pair<Device*, Copy>> copies;
  CopyTrace trace(layout, direction);
  for (const Extent& extent : extents_in(layout, block.offset, block.end())) {
    if (is_host(extent.memory)) continue;
    const std::uint64_t begin = std::max(extent.offset, block.offset);
    copies.emplace_back(extent.memory.device, Copy{.direction = direction,
                                                   .host = staged + (begin - block.offset),
                                                   .device = extent.memory.data + (begin - extent.offset),
                                                   .bytes = std::min(extent.end(), block.end()) - begin,
                                                   .after = extent.after});
    trace.add(*extent.memory.device, copies.back().second.bytes);
  }
  std::uint32_t tag = 0;
  {
    const std::scoped_lock lock(jobs_mutex_);
    tag = next_tag_++;
    jobs_[tag] = {.left = copies.size(), .done = std::move(done), .error = {}, .trace = std::move(trace)};
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
    std::vector<CopyQueue::Completion> copies;
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

void DeviceCopies::ended(const std::vector<CopyQueue::Completion>& copies) {
  for (const CopyQueue::Completion& copy : copies) {
    Job over;
    {
      const std::scoped_lock lock(jobs_mutex_);
      const auto job = jobs_.find(copy.tag);
      if (!job->second.error) job->second.error = copy.error;
      if (--job->second.left > 0) continue;
      over = std::move(job->second);
      jobs_.erase(job);
    }
    over.trace.end(over.error);
    over.done(over.error ? Status(std::unexpected(*over.error)) : Status());
  }
}

}  // namespace trunkline::tensor_file
