#include "trunkline/future.h"

#include <ranges>

#include "io/operation.h"

namespace trunkline {

bool Future::done() const { return operation_->done(); }

bool Future::wait(Timeout timeout) const { return operation_->wait(timeout); }

Result<std::uint64_t> Future::result(Timeout timeout) const {
  if (!operation_->wait(timeout)) {
    return std::unexpected(make_error(
        ErrorKind::timed_out,
        "timed out while waiting for an operation, which is still running; wait again, or cancel it"));
  }
  return operation_->result();
}

bool Future::cancel() {
  return operation_->drop_unissued(
      make_error(ErrorKind::cancelled, "the operation was cancelled before it was complete"));
}

void Future::on_done(std::function<void()> fn) { operation_->on_done(std::move(fn)); }

std::string Future::description() const { return operation_->description(); }

std::uint64_t Future::bytes_done() const { return operation_->bytes_done(); }

Result<std::uint64_t> wait_all(std::span<const Future> futures, Future::Timeout timeout) {
  using Clock = std::chrono::steady_clock;
  std::uint64_t total = 0;
  std::optional<Error> first;
  const auto start = Clock::now();
  // From the end: the last one submitted is likely the last to finish, so one sleep covers them all.
  for (const Future& future : std::views::reverse(futures)) {
    Future::Timeout left = timeout;
    if (timeout) left = std::max(std::chrono::nanoseconds(0), *timeout - (Clock::now() - start));
    auto result = future.result(left);
    if (result) {
      total += *result;
      continue;
    }
    if (result.error().kind == ErrorKind::timed_out && !future.done()) return result;
    first = result.error();  // the error kept last is the first in the list
  }
  if (first) return std::unexpected(std::move(*first));
  return total;
}

}  // namespace trunkline
