"""Warnings that point at the user's line, also those of threads that this line has started."""

import sys
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

_PACKAGE = __name__.partition(".")[0]


class Caller(NamedTuple):
    """A line of code outside of this package."""

    filename: str
    line: int
    module: str
    registry: dict[Any, Any]  # of its module: the warnings that were already shown there

    def warn(self, text: str) -> None:
        """Issue a RuntimeWarning that points at this line."""
        warnings.warn_explicit(text, RuntimeWarning, self.filename, self.line, self.module, self.registry)


def caller(*others: str) -> Caller:
    """Return the innermost line outside of this package, and of those named, that led to this call."""
    frame = sys._getframe(1)
    packages = (_PACKAGE, *others)
    while _is_in(packages, frame.f_globals.get("__name__")) and frame.f_back is not None:
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    return Caller(frame.f_code.co_filename, frame.f_lineno, names.get("__name__") or "<string>", registry)


def _is_in(packages: tuple[str, ...], module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in packages


def warn_without_failing(text: str, caller: Caller) -> None:
    """Warn at the line of `caller`; if that fails, print the text: the caller must not fail."""
    try:
        caller.warn(text)
    except Exception:  # a filter turns warnings into exceptions, or showwarning() fails
        if sys.stderr is not None:  # otherwise print() would use stdout
            with suppress(Exception):
                print(f"RuntimeWarning: {text}", file=sys.stderr)
