"""The key-value store of a process group, with a time limit for every operation."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from trunkline._errors import RankError
from trunkline._tensor_io.background import start_thread
from trunkline._tensor_io.flag import Flag

T = TypeVar("T")

_ABSENT = "\x00absent"  # differs from all our values, which are JSON or begin with a digit


def rank_error(rank: int, message: str) -> RankError:
    """Make an error that `rank` caused."""
    error = RankError(None, message, None)
    error.rank = rank
    return error


def value_of(store: Any, key: str) -> bytes | None:
    """Return the value of a key in a torch.distributed store, or None; does not wait for the key.

    In one operation: get() after check() would wait for a key that another rank removes in between. Stores
    without this operation would wait until their own timeout; RankStore.do() waits only until its own.
    """
    try:
        value = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    except NotImplementedError:
        return _checked_value_of(store, key)
    return None if value == _ABSENT.encode() else value


def _checked_value_of(store: Any, key: str) -> bytes | None:
    if not store.check([key]):
        return None
    try:
        return bytes(store.get(key))
    except (RuntimeError, LookupError):  # the timeout of the store
        if store.check([key]):
            raise
        return None


class _Call:
    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work
        self.ended = Flag()
        self.is_abandoned = False
        self.value: Any = None
        self.error: BaseException | None = None


class RankStore:
    """A torch.distributed store. Thread-safe.

    A separate thread calls the store: one whose process is stopped, or whose machine has failed, never
    answers, and torch has no time limit for most operations.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        """`timeout`: seconds until a store that does not answer counts as lost."""
        self._timeout = min(timeout, threading.TIMEOUT_MAX)
        self._stuck: _Call | None = None
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        calls = self._calls
        start_thread(lambda: _serve(store, calls))
        # Not at exit: handlers that run later may save, and the thread ends with the interpreter anyway.
        weakref.finalize(self, self._calls.put, None).atexit = False

    def do(self, work: Callable[[Any], T]) -> T:
        """Return work(store). Raises RankError if the connection is lost, or the store does not answer."""
        stuck = self._stuck
        if stuck is None or stuck.ended.is_set():
            call = _Call(work)
            self._calls.put(call)
            if call.ended.wait(self._timeout):
                if call.error is None:
                    value: T = call.value
                    return value
                if not isinstance(call.error, (RuntimeError, OSError)):  # torch's for a lost connection
                    raise call.error
                raise rank_error(
                    0,
                    "the connection to the process group's store is lost; rank 0 or the agent that serves it "
                    "died, or rank 0 has called destroy_process_group (then open a new Checkpointer): "
                    f"{call.error}",
                ) from call.error
            call.is_abandoned = True
            self._stuck = call
        raise rank_error(
            0,
            f"the process group's store has not answered for {self._timeout:g} s; rank 0 or the agent that "
            "serves it died, hangs or is stopped; see its log",
        )


def _serve(store: Any, calls: "SimpleQueue[_Call | None]") -> None:
    while (call := calls.get()) is not None:
        if not call.is_abandoned:
            try:
                call.value = call.work(store)
            except BaseException as error:
                call.error = error
        call.ended.set()
        del call
