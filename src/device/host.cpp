#include "device/device.h"
#include "mem/streaming_copy.h"

namespace trunkline {
namespace {

class HostDevice final : public Device {
 public:
  std::string_view name() const override { return "cpu"; }
  bool host_accessible() const override { return true; }
  void copy_from_host(std::byte* target, const std::byte* source, std::uint64_t bytes) override {
    streaming_copy(target, source, bytes);
  }
  void copy_to_host(std::byte* target, const std::byte* source, std::uint64_t bytes) override {
    streaming_copy(target, source, bytes);
  }
};

}  // namespace

Device& host_device() {
  static HostDevice device;
  return device;
}

}  // namespace trunkline
