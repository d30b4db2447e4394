// What the two halves of the stand-in know of each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace fake {

// --- the driver's

// What a call of `function` returns before it does anything; 0: it goes on.
int begin(const char* function);

// What no driver could accept.
void complain(const std::string& what);

bool is_memory_of_current(std::uint64_t address, std::size_t bytes);

// Adds the work of a transfer to a stream of the current context; `move` gets the memory that can be touched.
// False: it is no such stream.
bool add_work(void* handle, std::uint64_t device, std::size_t bytes, std::function<void(std::byte*)> move);

// --- cuFile's

void forget_memory(std::uint64_t device);  // it is freed
void reset_cufile();
std::uint64_t live_in_cufile(const std::string& what);

}  // namespace fake
