// The library's log records, handed to Python's logging.
#pragma once

#include <nanobind/nanobind.h>

namespace trunkline::python {

// Around calls that are few and may log much: the levels that Python's loggers have now are those of the
// library from here on, and what was logged meanwhile is delivered before the call returns. Needs the GIL, at
// both ends.
class LogDelivery {
 public:
  LogDelivery();
  LogDelivery(const LogDelivery&) = delete;
  LogDelivery& operator=(const LogDelivery&) = delete;
  ~LogDelivery();
};

// For the exit of the interpreter: delivers what is left, and ends the thread. Later records go to stderr, if
// TRUNKLINE_LOG asks for any. Needs the GIL.
void stop_log_delivery();

}  // namespace trunkline::python
