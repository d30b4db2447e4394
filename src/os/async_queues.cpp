#include "os/async_queues.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "os/fork_generation.h"
#include "os/unique_fd.h"

namespace trunkline::os {
namespace {

// Keys of this library's own queues; 0: a free entry. Lock-free, since a fork could leave a lock held. A
// queue that finds no free entry is treated as somebody else's.
std::array<std::atomic<std::uint64_t>, 1024> own_queues;

// A forked child has none of its parent's queues, and may reuse their numbers.
std::uint64_t key_of(bool is_ring, std::uint64_t number) {
  constexpr unsigned kKindShift = 38;  // page numbers of addresses are below
  constexpr unsigned kGenerationShift = 40;
  return (std::uint64_t{fork_generation()} << kGenerationShift) |
         (std::uint64_t{is_ring ? 1U : 2U} << kKindShift) | number;
}

std::uint64_t key_of_ring(int fd) { return key_of(true, static_cast<std::uint64_t>(fd)); }
std::uint64_t key_of_context(std::uintptr_t address) { return key_of(false, address / 4096); }

bool is_own(std::uint64_t key) {
  return std::ranges::any_of(own_queues, [key](const auto& slot) { return slot.load() == key; });
}

// FNV-1a: fingerprints can only be compared.
class Fingerprint {
 public:
  void add(std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      hash_ ^= (value >> (8 * byte)) & 0xFF;
      hash_ *= 1099511628211U;
    }
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 14695981039346656037U;
};

// Adds a ring's progress as fdinfo reports it (io_uring/fdinfo.c). Returns false where fdinfo lacks it: the
// ring may be locked while it is in use.
bool add_ring(int fd, Fingerprint& fingerprint) {
  constexpr int kTries = 100;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(fd));
    std::string name;
    bool is_known = false;
    while (info >> name) {
      if (name != "SqHead:" && name != "CachedSqHead:" && name != "CqTail:" && name != "CachedCqTail:")
        continue;
      std::uint64_t count = 0;
      if (!(info >> count)) return false;
      fingerprint.add(count);
      is_known = true;
    }
    if (is_known) return true;
  }
  return false;
}

bool add_rings(Fingerprint& fingerprint) {
  constexpr std::string_view kRing = "anon_inode:[io_uring]";
  std::error_code code;
  std::filesystem::directory_iterator descriptors("/proc/self/fd", code);
  if (code) return false;
  for (const auto end = std::filesystem::directory_iterator(); descriptors != end;
       descriptors.increment(code)) {
    std::array<char, 64> target{};
    const ssize_t length = ::readlink(descriptors->path().c_str(), target.data(), target.size());
    if (length < 0 || std::string_view(target.data(), static_cast<std::size_t>(length)) != kRing) continue;
    const int fd = std::stoi(descriptors->path().filename().string());
    if (is_own(key_of_ring(fd))) continue;
    fingerprint.add(key_of_ring(fd));
    if (!add_ring(fd, fingerprint)) return false;
  }
  return !code;
}

// An AIO context is a mapping; the kernel keeps its counters at the start (struct aio_ring of fs/aio.c): id,
// size, head, tail. They are read through /proc/self/mem, since the mapping may vanish meanwhile.
bool add_contexts(Fingerprint& fingerprint) {
  std::ifstream maps("/proc/self/maps");
  if (!maps) return false;
  const UniqueFd memory(::open("/proc/self/mem", O_RDONLY | O_CLOEXEC));
  std::string line;
  while (std::getline(maps, line)) {
    if (line.find("/[aio]") == std::string::npos) continue;
    const std::uintptr_t address = std::stoull(line, nullptr, 16);
    if (is_own(key_of_context(address))) continue;
    std::array<std::uint32_t, 4> counters{};
    if (!memory.valid() || ::pread(memory.get(), counters.data(), sizeof(counters),
                                   static_cast<off_t>(address)) != sizeof(counters))
      return false;
    fingerprint.add(address);
    fingerprint.add(counters[3]);
  }
  return true;
}

}  // namespace

OwnQueue OwnQueue::ring(int fd) { return OwnQueue(key_of_ring(fd)); }
OwnQueue OwnQueue::context(std::uintptr_t address) { return OwnQueue(key_of_context(address)); }

OwnQueue::OwnQueue(std::uint64_t key) {
  for (auto& slot : own_queues) {
    std::uint64_t none = 0;
    if (!slot.compare_exchange_strong(none, key)) continue;
    slot_ = &slot;
    return;
  }
}

OwnQueue::OwnQueue(OwnQueue&& other) noexcept : slot_(std::exchange(other.slot_, nullptr)) {}

OwnQueue& OwnQueue::operator=(OwnQueue&& other) noexcept {
  std::swap(slot_, other.slot_);
  return *this;
}

OwnQueue::~OwnQueue() {
  if (slot_ != nullptr) slot_->store(0);
}

std::optional<std::uint64_t> progress_of_other_queues() {
  Fingerprint fingerprint;
  try {
    if (!add_rings(fingerprint) || !add_contexts(fingerprint)) return std::nullopt;
  } catch (const std::exception&) {  // from the standard library: a number in /proc cannot be parsed
    return std::nullopt;
  }
  return fingerprint.value();
}

}  // namespace trunkline::os
