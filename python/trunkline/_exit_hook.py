"""Calls functions at the exit of the interpreter, just before the exit handler of trunkline._core.

Exit handlers run in the reverse order of their registration. Modules that save are imported at first use:
maybe after the program has registered handlers that save, maybe in one of them, when no handler can be
registered any more. So this handler is registered when the package is imported. Handlers registered before
that run later: by then calls of the package in threads other than the main one are blocked
(register_shutdown.cpp).
"""

import atexit
import math
import os
import sys
import threading
from collections.abc import Callable

from trunkline import _core as _core  # registers its handler first
from trunkline._errors import Error
from trunkline._warnings import caller

_calls: list[Callable[[], object]] = []
_has_run = False
# Imported by an exit handler: neither handler runs.
_is_too_late = bool(getattr(threading, "_SHUTTING_DOWN", False))


def call_at_exit(call: Callable[[], object]) -> None:
    """Register `call`. When it is called, has_passed() is already true."""
    _calls.append(call)


def has_passed() -> bool:
    """Whether the calls are being made, have been made, or will never be made."""
    return _has_run or _is_too_late


def on_main_thread() -> bool:
    """Whether this is the thread that runs exit handlers. Needs no lock, unlike current_thread()."""
    return threading.get_ident() == threading.main_thread().ident


def check_not_finalizing(what: str) -> None:
    """Raise Error that names `what` if all exit handlers have run: modules can no longer be imported."""
    if sys.is_finalizing():
        raise Error(
            None,
            f"cannot {what}: the interpreter is shutting down, and its exit handlers have run; do it before "
            "the program ends or in a handler of atexit, not in __del__",
        )


def check_threads_run(what: str) -> None:
    """Raise Error that names `what` if the exit has stopped this thread, or all threads."""
    check_not_finalizing(what)
    if _has_run and not on_main_thread():
        raise Error(
            None,
            f"cannot {what} in this thread: the interpreter is exiting, and only its main thread runs on; "
            "let the program wait for this thread (Thread.join) before it ends",
        )


def _check_timeout() -> None:
    """Warn of a TRUNKLINE_EXIT_TIMEOUT that the exit will ignore."""
    text = os.environ.get("TRUNKLINE_EXIT_TIMEOUT", "")
    try:
        seconds = float(text or "0")
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        caller("importlib", "_frozen_importlib", "_frozen_importlib_external").warn(
            f"environment variable TRUNKLINE_EXIT_TIMEOUT: must be a number of seconds from 0, not {text!r}; "
            "the exit waits for 120 seconds"
        )


def _run() -> None:
    global _has_run
    _has_run = True
    for call in _calls:
        call()


atexit.register(_run)
_check_timeout()
