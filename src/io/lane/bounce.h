// Moves the payload of a transfer between the caller's memory and its bounce slot.
#pragma once

#include "io/lane/transfer.h"

namespace trunkline::io {

// Where a transfer's payload is, or will be, in its slot.
std::byte* payload(const Transfer& transfer);

// copy_out() copies what was read through a slot to the caller's host memory; copy_in() copies what will be
// written to the slot.
void copy_out(const Transfer& transfer);
void copy_in(const Transfer& transfer);

// For a transfer that should go through a slot when there is none: the page cache accepts any address and
// offset.
void use_page_cache(Transfer& transfer);

}  // namespace trunkline::io
