"""Waits that logs and traces show: for whom, for what, and how long."""

import time
from collections.abc import Callable
from types import TracebackType

from trunkline._logging import Log
from trunkline._trace import span

LONG_SECONDS = 3.0  # a wait that takes longer is logged


class Wait:
    """A wait, from __enter__() to __exit__(): a slice of a trace, and two log records if it is long.

    The code that waits calls check() repeatedly, or waits by until(). The first record is logged while the
    wait goes on, since it may never end.
    """

    def __init__(self, log: Log, name: str, of: str = "", warn_after: float | None = None) -> None:
        """`name`, `of`: of the slice. `warn_after`: seconds after which the user should look into it."""
        self._log = log
        self._span = span("wait", name, of)
        self._warn_after = warn_after
        self._began = 0.0
        self._logged = ""  # what is waited for, once it has been logged
        self._has_warned = False

    def __enter__(self) -> "Wait":
        self._span.__enter__()
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._span.__exit__(kind, error, trace)
        if self._logged:
            self._log.info("waited %.1f s for %s", time.monotonic() - self._began, self._logged)

    def check(self, what: Callable[[], str]) -> None:
        """Log what is waited for ("rank 1, ...") if it has taken long, once at each level."""
        seconds = time.monotonic() - self._began
        if self._warn_after is not None and seconds >= self._warn_after and not self._has_warned:
            self._has_warned = True
            self._logged = what()
            self._log.warn("still waiting after %.0f s for %s", seconds, self._logged)
        elif seconds >= LONG_SECONDS and not self._logged:
            self._log_long(what)

    def _log_long(self, what: Callable[[], str]) -> None:
        self._logged = what()
        self._log.info("waiting for %s", self._logged)

    def until(
        self, wait: Callable[[float | None], bool], what: Callable[[], str], timeout: float | None = None
    ) -> bool:
        """Return wait(timeout), which returns whether what it waits for has happened."""
        if timeout is not None and timeout <= LONG_SECONDS:
            return wait(timeout)
        if wait(LONG_SECONDS):
            return True
        self._log_long(what)
        return wait(None if timeout is None else timeout - LONG_SECONDS)
