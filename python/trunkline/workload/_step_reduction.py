"""Where ranks of MPI meet: before each step, and at the end of a job."""

import errno
import time
from array import array
from collections.abc import Callable
from typing import Protocol

from trunkline._errors import Cancelled

_FAILED = 2**63 - 1  # contributed by a rank that failed; more than any lateness
_POLL_SECONDS = (20e-6, 2e-3)  # at least, at most


class Request(Protocol):
    """An operation of MPI that is under way."""

    def Test(self) -> bool:  # noqa: N802
        """Whether it is complete. Lets MPI go on with it."""


# Begins a nonblocking reduction over all ranks, which sets the second array to the maximum of the first ones.
BeginMaximum = Callable[["array[int]", "array[int]"], Request]


class StepReduction:
    """The reductions of one rank in a job, which all ranks begin in the same order: one for each step.

    A rank that fails contributes that to its next one. So all others get it in their next one, of a step or
    at their end, and no reduction is left incomplete. The loop of a training calls begin() and poll().
    """

    def __init__(self, begin_maximum: BeginMaximum) -> None:
        """`begin_maximum`: of the communicator."""
        self._begin_maximum = begin_maximum
        self._own = array("q", [0])
        self._largest = array("q", [0])
        self._request: Request | None = None
        self._has_failed = False  # a rank has, and all know it

    def begin(self, value: int) -> None:
        """Contribute a value of at least 0."""
        assert self._request is None
        self._own[0] = value
        self._request = self._begin_maximum(self._own, self._largest)

    def poll(self) -> int | None:
        """Return the largest value of all ranks; None until all have contributed.

        Raises Cancelled if a rank has failed.
        """
        assert self._request is not None
        if not self._request.Test():
            return None
        self._request = None
        if self._largest[0] == _FAILED:
            self._has_failed = True
            raise Cancelled(errno.ECANCELED, "another rank has failed")
        return self._largest[0]

    def finish(self, failed: bool, seconds: float | None = None) -> bool:
        """Meet all ranks at the end of the job; return whether they came within so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            if self._request is not None and not self._wait(deadline):  # for the step that was interrupted
                return False
            if not self._has_failed:
                self.begin(_FAILED if failed else 0)
                return self._wait(deadline)
        except Cancelled:
            pass
        return True

    def _wait(self, deadline: float | None) -> bool:
        return wait_until(lambda: self.poll() is not None, deadline)


def wait_until(is_done: Callable[[], bool], deadline: float | None = None) -> bool:
    """Sleep until `is_done`, which MPI's own waits would spin for; return False at the deadline."""
    least, most = _POLL_SECONDS
    pause = least
    while not is_done():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(most, pause * 1.2)
    return True
