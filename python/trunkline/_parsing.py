"""Calls of Python's own parser: ast.literal_eval() and what uses it."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")
_ATTEMPTS = 50


def parsed(parse: Callable[[], _T]) -> _T:
    """Return parse(), which parses text as Python does.

    CPython 3.11 counts the depth of all such calls in one place. Where several threads parse, and garbage is
    collected meanwhile, they may fail with a SystemError, which says nothing about the text.
    """
    for _ in range(_ATTEMPTS):
        with suppress(SystemError):
            return parse()
    return parse()
