"""Reads weights again after an error of the disk, so that a fault that passes does not end the server."""

import logging
import time
from typing import Any

from trunkline._errors import Corrupt, Error
from trunkline._streaming.bound_unit import UnitMemory

_logger = logging.getLogger("trunkline.sglang")

_LONGEST_PAUSE_SECONDS = 2.0


class RetryingMemory(UnitMemory):
    """Units that are read again for a while if reading them fails; the requests being served wait meanwhile.

    Bytes that were changed (Corrupt) stay changed: that is an error at once.
    """

    def __init__(self, *arguments: Any, retry_seconds: float, **options: Any) -> None:
        """As UnitMemory. `retry_seconds`: how long to read again before the error is raised."""
        super().__init__(*arguments, **options)
        self._retry_seconds = retry_seconds

    def acquire(self, index: int) -> tuple[int, int]:
        """Wait for a unit. Raises Corrupt, and the last error of reading after `retry_seconds` of errors."""
        begin: float | None = None
        pause = 0.1
        while True:
            try:
                acquired = super().acquire(index)
            except Corrupt:
                raise
            except Error as error:
                if begin is None:
                    begin = time.monotonic()
                    _logger.error(
                        "cannot read weights: %s; requests wait while it is tried again, at most %g seconds",
                        error,
                        self._retry_seconds,
                    )
                if time.monotonic() + pause - begin > self._retry_seconds:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            if begin is not None:
                _logger.warning("weights can be read again, after %.1f seconds", time.monotonic() - begin)
            return acquired
