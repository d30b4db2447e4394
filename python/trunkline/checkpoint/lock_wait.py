"""Changing a directory of checkpoints that another process may have locked for a moment."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from trunkline._errors import Error
from trunkline._logging import Log
from trunkline._waits import Wait

T = TypeVar("T")

_log = Log("checkpoint")

# How long a save waits for another process that has locked the directory: long enough for garbage collection,
# which releases the lock every few seconds (CollectionPace in src/checkpoint/store.h), not for a save.
_LOCK_TIMEOUT_SECONDS = 10.0
_POLL_SECONDS = 0.01


def retry_while_locked(change: Callable[[], T]) -> T:
    """Change the directory; retry while it is locked: a process that opens it locks it to collect garbage."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    try:
        return change()
    except Error as error:
        if not _is_locked(error):
            raise
        why = str(error)
    _log.debug("trying again for %g s: %s", _LOCK_TIMEOUT_SECONDS, why)
    with Wait(_log, "wait for the lock of the directory") as wait:
        while True:
            wait.check(lambda: f"the lock of a directory of checkpoints: {why}")
            time.sleep(_POLL_SECONDS)
            try:
                return change()
            except Error as error:
                if not _is_locked(error) or time.monotonic() > deadline:
                    raise


def _is_locked(error: Error) -> bool:
    # EAGAIN: another process has changed the number of volumes.
    return error.errno in (errno.EBUSY, errno.EAGAIN)
