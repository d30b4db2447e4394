// The four system calls of Linux native asynchronous I/O (io_setup(2)), which the C library does not wrap,
// and the preparation of their control blocks. They return what libaio's functions of these names return: a
// result, or a negative errno.
#pragma once

#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace trunkline::io::aio {

inline long negative_errno(long result) { return result < 0 ? -errno : result; }

inline long setup(unsigned events, aio_context_t* context) {
  return negative_errno(::syscall(SYS_io_setup, events, context));
}
inline long destroy(aio_context_t context) { return negative_errno(::syscall(SYS_io_destroy, context)); }
inline long submit(aio_context_t context, long count, iocb** blocks) {
  return negative_errno(::syscall(SYS_io_submit, context, count, blocks));
}
inline long get_events(aio_context_t context, long least, long most, io_event* events, timespec* timeout) {
  return negative_errno(::syscall(SYS_io_getevents, context, least, most, events, timeout));
}

inline iocb transfer(std::uint16_t opcode, int fd, const std::byte* data, std::uint64_t bytes,
                     std::uint64_t offset) {
  iocb block{};
  block.aio_lio_opcode = opcode;
  block.aio_fildes = static_cast<std::uint32_t>(fd);
  block.aio_buf = reinterpret_cast<std::uintptr_t>(data);
  block.aio_nbytes = bytes;
  block.aio_offset = static_cast<std::int64_t>(offset);
  return block;
}
inline iocb fsync(int fd) { return transfer(IOCB_CMD_FSYNC, fd, nullptr, 0, 0); }
inline iocb poll(int fd, unsigned events) {
  iocb block = transfer(IOCB_CMD_POLL, fd, nullptr, 0, 0);
  block.aio_buf = events;
  return block;
}

}  // namespace trunkline::io::aio
