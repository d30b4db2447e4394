// Makes new memory resident, with the page size that is cheapest on this machine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trunkline {

// Makes the pages of anonymous memory resident that was mapped for huge pages; pages that are already
// resident keep their contents.
//
// A huge page costs only its zeroing, a fifth of the price of the same memory in small pages. But a virtual
// machine whose hypervisor reclaims free memory (free page reporting,
// Documentation/mm/free_page_reporting.rst) has to get each huge page back from there: that was measured at
// 2.5 s/GB, where small pages cost 0.4 s/GB and resident huge ones 0.1 s/GB. So the processor time of each
// huge page is measured: after an expensive one, the next pages are small until another huge page is tried.
void populate_pages(std::byte* data, std::uint64_t bytes);

}  // namespace trunkline
