// The consumer's side of DLPack (https://dmlc.github.io/dlpack/latest/), versions 0 and 1.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace trunkline::python {

// A tensor of a producer, released at destruction. Needs the GIL.
class DlpackTensor {
 public:
  DlpackTensor() = default;
  DlpackTensor(DlpackTensor&& other) noexcept
      : tensor_(std::exchange(other.tensor_, nullptr)), versioned_(other.versioned_) {}
  DlpackTensor& operator=(DlpackTensor&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    std::swap(versioned_, other.versioned_);
    return *this;
  }
  ~DlpackTensor();

  // Asks `producer` for its tensor: with version 1, so that it can say what is read-only, else as version 0.
  // `stream` is for tensors of a GPU: its later work comes after the producer's pending work.
  static DlpackTensor borrow_from(nanobind::handle producer,
                                  std::optional<std::uintptr_t> stream = std::nullopt);

  std::byte* data() const;
  std::uint64_t bytes()
      const;                // of all elements; those of less than a byte are packed unless marked as padded
  bool contiguous() const;  // in C order
  bool read_only() const;   // version 0 cannot say so
  bool copied() const;      // the producer gave a copy: reading into it would be lost

 private:
  void* tensor_ = nullptr;  // ManagedTensor or VersionedManagedTensor
  bool versioned_ = false;
};

// A tensor as the tables of DlpackExchange describe it; the producer owns it.
struct DlpackView {
  std::byte* data;
  std::uint64_t bytes;
  bool contiguous;  // in C order
  bool complex;     // its elements are complex numbers
};

// The table of C functions that a type may have besides __dlpack__ (DLPack 1.2). It costs a tenth of reading
// a tensor's Python attributes.
class DlpackExchange {
 public:
  // nullopt if `type` has none, or one of an unknown version. Tables live as long as the process.
  static std::optional<DlpackExchange> of(nanobind::handle type);

  // nullopt if the tensor is not in host memory, or DLPack cannot describe it in whole bytes. The other
  // interfaces then report why.
  std::optional<DlpackView> describe(nanobind::handle tensor) const;

 private:
  explicit DlpackExchange(const void* table) : table_(table) {}
  const void* table_;
};

// Device types of __dlpack_device__ whose memory the host reads and writes.
inline constexpr int kDlpackCpu = 1;
inline constexpr int kDlpackCudaHost = 3;
inline constexpr int kDlpackRocmHost = 11;
inline constexpr int kDlpackCuda = 2;  // not of the host

// How DLPack names the default stream of a CUDA device; 0 is none of its streams.
inline constexpr std::uintptr_t kDlpackLegacyStream = 1;

}  // namespace trunkline::python
