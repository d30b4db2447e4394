"""Reads directories that may not respond, such as tiers on NFS whose server is gone, in another thread.

System calls wait for such a filesystem in the kernel, where no signal handler runs: Ctrl-C would have no
effect in the thread that makes them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from trunkline import _exit_hook
from trunkline._logging import Log
from trunkline._tensor_io.at_exit import say
from trunkline._tensor_io.background import start_thread
from trunkline._tensor_io.flag import Flag
from trunkline._waits import Wait

_log = Log("checkpoint")
_Result = TypeVar("_Result")

_SAY_SECONDS = 5.0


def read_beside(read: Callable[[], _Result], what: Callable[[], str]) -> _Result:
    """Return what read() returns, or raise what it raises. A signal handler that raises ends the wait.

    `read` must only read, since it may go on, and end at any time, after this has raised. what: what it is
    reading just now, for a message to stderr after some seconds.
    """
    if _exit_hook.has_passed():  # no thread can be started any more
        return read()
    done = Flag()
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(read())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    start_thread(run)
    if not done.wait(_SAY_SECONDS):
        with Wait(_log, "wait for a directory", what()) as wait:
            say(f"waiting for {what()}, which does not respond; Ctrl-C ends the wait")
            wait.until(done.wait, what)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # otherwise the traceback would keep this frame, and so itself
    found: _Result = result[0]
    return found
