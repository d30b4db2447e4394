"""What on_error="skip" leaves out."""

from trunkline._errors import Corrupt, EndOfFile, Error, Format, Unsupported
from trunkline._logging import Log

_log = Log("data")
_MAX_LOGGED = 100

DAMAGE = (Corrupt, Format, EndOfFile, Unsupported)  # what can be skipped; files that cannot be read raise


class Skipped:
    """Collects what is left out, or raises."""

    def __init__(self, skip: bool) -> None:
        """`skip`: False raises the first error instead."""
        self.skip = skip
        self._found: list[tuple[str, int, str]] = []

    def add(self, path: str, offset: int, error: Error) -> None:
        """Leave out what is damaged at `offset` of a file, or raise the error."""
        if not self.skip:
            raise error
        self.add_reason(path, offset, str(error))

    def add_reason(self, path: str, offset: int, reason: str) -> None:
        """Leave out what is damaged at `offset` of a file."""
        self._found.append((path, offset, reason))

    def report(self) -> tuple[tuple[str, int, str], ...]:
        """Log what was left out, and return it."""
        for path, offset, reason in self._found[:_MAX_LOGGED]:
            _log.warn("skipped from byte %d of %s: %s", offset, path, reason)
        if len(self._found) > _MAX_LOGGED:
            _log.warn("skipped %d more; Index.skipped lists them", len(self._found) - _MAX_LOGGED)
        return tuple(self._found)
