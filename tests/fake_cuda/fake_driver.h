// The interface between the two halves of the fake.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace fake {

// --- of the driver

// The result of a call of `function` before it does anything; 0: it continues.
int begin(const char* function);

// Records a call that no real driver would accept.
void complain(const std::string& what);

bool is_memory_of_current(std::uint64_t address, std::size_t bytes);

// Adds the work of a transfer to a stream of the current context; `move` is called with the accessible
// memory. Returns false if there is no such stream.
bool add_work(void* handle, std::uint64_t device, std::size_t bytes, std::function<void(std::byte*)> move);

// --- of cuFile

void forget_memory(std::uint64_t device);  // it is freed
void reset_cufile();
std::uint64_t live_in_cufile(const std::string& what);

}  // namespace fake
