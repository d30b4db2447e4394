// Moving the payload of a transfer between the caller's memory and its bounce slot.
#pragma once

#include "io/lane/transfer.h"

namespace trunkline::io {

// Where the payload of a transfer is, or will be, in its slot.
std::byte* payload(const Transfer& transfer);

// Copies what was read through a slot to where it belongs on the host, or what is written to its slot.
void copy_out(const Transfer& transfer);
void copy_in(const Transfer& transfer);

// Where no slot can be had for a transfer that should bounce: the page cache takes any address and offset.
void avoid_slot(Transfer& transfer);

}  // namespace trunkline::io
