"""Keeps what is transferred below a number of bytes a second."""

import time
from collections.abc import Callable

# A pause ends a little late; so much of that is made up for by the next one.
_CREDIT_SECONDS = 0.01


class RateLimit:
    """Paces transfers: call start() before the first, then pace() after each."""

    def __init__(
        self,
        bytes_per_second: int | None,
        pause: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bytes_per_second`: None for no limit. pause: waits for so many seconds."""
        self._bytes_per_second = bytes_per_second
        self._pause = pause
        self._clock = clock
        self._due = 0.0  # when what was transferred may have been

    def start(self) -> None:
        """Begin now: time that has passed before does not count."""
        self._due = self._clock()

    def pace(self, nbytes: int) -> None:
        """Wait until `nbytes`, which were transferred, are within the limit.

        What took longer than the limit requires does not let later transfers be faster.
        """
        if self._bytes_per_second is None:
            return
        self._due += nbytes / self._bytes_per_second
        left = self._due - self._clock()
        if left > 0:
            self._pause(left)
        self._due = max(self._due, self._clock() - _CREDIT_SECONDS)
