// Making new memory present, with the pages that cost least on this machine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trunkline {

// The kernel provides the pages of anonymous memory that was mapped for huge pages and not touched yet: bytes
// that are there already stay as they are.
//
// A huge page costs the zeroing of it, a fifth of what as much memory costs in small pages. But a virtual
// machine whose hypervisor takes free memory back (free page reporting,
// Documentation/mm/free_page_reporting.rst) gets each huge page anew from there, which was measured at 2.5
// s/GB, where small pages cost 0.4 s/GB and huge ones that are there 0.1 s/GB. So the processor time of each
// huge page is looked at: after a dear one the next come as small pages, until another is tried.
void make_present(std::byte* data, std::uint64_t bytes);

}  // namespace trunkline
