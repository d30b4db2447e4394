// Makes new memory resident, with the page size that is cheapest on this machine.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace trunkline {

// Whether huge pages are worth their price; thread-safe, and a lost update only means one trial too many or
// too few.
//
// A huge page costs only its zeroing, a fifth of the price of the same memory in small pages. But a virtual
// machine whose hypervisor reclaims free memory (free page reporting,
// Documentation/mm/free_page_reporting.rst) has to get each huge page back from there: that was measured
// at 2.5 to 4 s/GB, where small pages, which also come from what is too scattered to be reclaimed, cost 0.4
// to 0.5 s/GB and resident huge ones 0.1 s/GB. So the processor time of each huge page is measured. After an
// expensive one, small pages replace the next, until another is tried; after each further expensive trial,
// for twice as long.
class PageSizePolicy {
 public:
  static constexpr std::int64_t kExpensiveNs = 1'500'000;  // zeroing one takes 200 us
  static constexpr int kLeastSmall = 16;
  static constexpr int kMostSmall = 256;

  // How many huge pages in a row are to be replaced by small ones, the next one included; 0: none, and the
  // price of the next is of interest. Counts the next one.
  int next_small();
  // The processor time that a huge page took.
  void add_price(std::int64_t cpu_ns);

 private:
  std::atomic<int> small_left_{0};
  std::atomic<int> stretch_{kLeastSmall};
};

// Anonymous memory that was mapped for huge pages, and is made resident piece by piece by any number of
// threads.
struct FreshMapping {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::atomic<std::byte*> small_until = nullptr;  // the memory below this was marked for small pages
};

// Makes the pages that hold `bytes` bytes at `data`, within `mapping`, resident; those that are already
// resident keep their contents. A huge page is populated by the call for the bytes in which it begins.
void populate_pages(std::byte* data, std::uint64_t bytes, FreshMapping& mapping);

}  // namespace trunkline
