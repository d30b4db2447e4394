// Files that are registered with cuFile.
#pragma once

#include <memory>
#include <string>

#include "device/cuda/device.h"
#include "device/gds/api.h"
#include "os/unique_fd.h"

namespace trunkline::cufile {

class CufileFile final : public GdsFile {
 public:
  // Registers a duplicate of `fd`: where a context is lost, cuFile may use it for longer than the caller has
  // the file open.
  static Result<std::shared_ptr<const CufileFile>> open(const Api& api, int fd, const std::string& path);

  CufileFile(const Api& api, os::UniqueFd fd, Handle handle);
  ~CufileFile() override;

  const Api& api() const { return api_; }
  Handle handle() const { return handle_; }

 private:
  const Api& api_;
  const os::UniqueFd fd_;
  const Handle handle_;
  const unsigned generation_;  // of forks
};

// The error of a file for which GPUDirect Storage cannot be used.
Error unsupported_file(const std::string& path, const std::string& why);

// See Device::open_gds.
Result<std::shared_ptr<const GdsFile>> open_file(const cuda::CudaDevice& device, const GdsSource& source,
                                                 GdsProbe probe);

// A file that open_file returned.
inline const CufileFile& cufile_file(const GdsFile& file) { return static_cast<const CufileFile&>(file); }

}  // namespace trunkline::cufile
