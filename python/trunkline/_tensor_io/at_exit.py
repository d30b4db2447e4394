"""Finishes saves that are running when the interpreter exits, unless Ctrl-C abandons them."""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from trunkline import _core, _exit_hook
from trunkline._errors import Cancelled

if TYPE_CHECKING:
    from trunkline._tensor_io.flag import Flag
    from trunkline.checkpoint.save import SaveHandle

_NOTICE_SECONDS = 1.0  # until a message says what the exit waits for
_OTHERS_NOTICE_SECONDS = 2.0  # the same for what is not a save; as for operations (register_shutdown.cpp)
_MAX_NAMED = 3  # saves that the message names


def say(text: str) -> None:
    """Print a line to stderr, if there is one."""
    if sys.stderr is not None:  # otherwise print() would use stdout
        with suppress(Exception):
            print(f"trunkline: {text}", file=sys.stderr, flush=True)


def end_by_failure() -> None:
    """Make the process exit with status 1, instead of any other, once the interpreter has ended.

    Called by an exit handler: all others still run, and stdout and stderr are flushed. The status is already
    decided by then, and os._exit() would skip the handlers that were registered earlier. So exit(1) is
    registered as an exit handler of the C library, where it continues with the remaining handlers.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(libc.exit, ctypes.c_void_p(1), None)


class ExitWatch:
    """Makes the interpreter's exit wait for saves, and other work, and reports failed saves.

    1. Before threads are joined, Ctrl-C gets another handler: KeyboardInterrupt would only end the joining,
       with exit code 0, and end the save with the interpreter. Saves run in threads that are not joined; a
       thread that is joined waits for them, and prints what it waits for.
    2. When exit handlers run, all saves have ended. If something ended the joining early, the exit waits for
       them here, also if signal handlers raise SystemExit. Then their errors are reported.
    3. The same happens again when the handlers that were registered since the package was imported have run.
    4. Saves of other handlers run in the calling thread (start_thread): nothing waits for other threads.
    """

    def __init__(self, unfinished: "dict[Flag, None]") -> None:
        """`unfinished`: flags of other work than saves; each is set when the work has ended."""
        self._unfinished = unfinished
        self._under_way: Callable[[], list[SaveHandle]] = list
        self._report: Callable[[], bool] = lambda: False
        self._watched = 0  # id of the multiprocessing process in which a finalizer reports
        self._exiting = False
        self._interrupted = False

    def watch_saves(self, under_way: Callable[[], "list[SaveHandle]"], report: Callable[[], bool]) -> None:
        """`under_way`: returns running saves; `report`: called when all have ended; returns if one failed."""
        self._under_way = under_way
        self._report = report

    def register(self) -> None:
        """Register the handlers that run at exit."""
        atexit.register(self._wait_and_report)
        _exit_hook.call_at_exit(self._wait_and_report)
        # There is no public hook before threads are joined; concurrent.futures uses this one, too.
        early = getattr(threading, "_register_atexit", None)
        if early is not None:
            with suppress(RuntimeError):  # the exit has begun
                early(self._begin)

    def watch_child(self) -> None:
        """In a multiprocessing process, wait and report there, too. Called when a save begins.

        Forked ones end by os._exit(), without exit handlers.
        """
        process = sys.modules.get("multiprocessing.process")
        if process is None or process.parent_process() is None or self._watched == os.getpid():
            return
        self._watched = os.getpid()
        from multiprocessing import util

        # The last finalizer: an exception skips all later ones.
        util.Finalize(None, self._end_child, exitpriority=-1_000_000)

    def _end_child(self) -> None:
        error = sys.exc_info()[1]  # by which the process ends
        has_finished = self._wait()
        has_failed = self._report()
        is_success = error is None or (isinstance(error, SystemExit) and not error.code)
        if is_success and (has_failed or not has_finished):
            raise SystemExit(1)

    def _begin(self) -> None:
        self._exiting = True
        can_abandon = self._take_interrupts()
        self.keep(can_abandon)

    def keep(self, can_abandon: bool = False) -> None:
        """If the exit has begun, make it wait for the saves that are running now."""
        if not self._exiting:
            return
        saves = self._under_way()
        if saves or self._unfinished:
            with suppress(RuntimeError):  # no thread can be started: step 2 waits
                threading.Thread(
                    target=self._wait_for, args=(saves, can_abandon), name="trunkline-exit", daemon=False
                ).start()

    def _wait_and_report(self) -> None:
        self._wait()
        self._report()

    def _wait(self) -> bool:
        """Wait for the saves; return whether all could finish."""
        saves = self._under_way()
        if saves or self._unfinished:
            with self._noting_interrupts():
                try:
                    self._wait_through_exits(saves)
                except BaseException:
                    # KeyboardInterrupt, or another exception of a signal handler. Errors of the waiting
                    # itself must not end a save: _report_later suppresses them.
                    _abandon(saves)
                    return False
        return True

    def _wait_through_exits(self, saves: "Sequence[SaveHandle]") -> None:
        """Wait, and continue if a signal handler raises SystemExit: the process is already exiting.

        A scheduler may repeat SIGTERM, which must not abandon a save that it allows time for. Ctrl-C does,
        also if its handler raises SystemExit.
        """
        while True:
            with suppress(SystemExit):  # of a signal between the inner ones
                while True:
                    with suppress(SystemExit):
                        if self._interrupted:
                            raise KeyboardInterrupt
                        self._wait_for(saves, self._take_interrupts())
                        return

    @contextmanager
    def _noting_interrupts(self) -> Iterator[None]:
        """Record SIGINT also if the program has its own handler for it."""
        handler = signal.getsignal(signal.SIGINT)
        is_their_own = callable(handler) and handler not in (signal.default_int_handler, self._on_interrupt)
        if not is_their_own or threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            assert callable(handler)
            handler(number, frame)

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) is note:
                signal.signal(signal.SIGINT, handler)

    def _wait_for(self, saves: "Sequence[SaveHandle]", can_abandon: bool) -> None:
        _report_later(saves, can_abandon)
        for save in saves:
            save._done.wait()
        self._wait_for_others()

    def _wait_for_others(self) -> None:
        """Wait for calls that were interrupted, as long as they may take.

        Each was cancelled by the interrupt, so that nothing is left of it but transfers that a device has not
        answered yet. What does not end in time is left to the exit handler of the library, which ends the
        process with an error while operations are pending.
        """
        began = time.monotonic()
        timeout = _core.exit_timeout()
        has_notified = False
        while flags := list(self._unfinished):
            passed = time.monotonic() - began
            if passed >= timeout:
                say(f"gave up waiting for interrupted reads and writes after {passed:.0f} s")
                for flag in flags:
                    self._unfinished.pop(flag, None)
                end_by_failure()
                return
            if passed >= _OTHERS_NOTICE_SECONDS and not has_notified:
                has_notified = True
                say("waiting for reads and writes that were interrupted and that the device has not answered")
            flags[0].wait(min(timeout - passed, _OTHERS_NOTICE_SECONDS))

    def _take_interrupts(self) -> bool:
        """Make Ctrl-C abandon saves, unless the program has its own handler; return whether it does."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)
        return signal.getsignal(signal.SIGINT) == self._on_interrupt

    @contextmanager
    def interrupts_kill(self) -> Iterator[None]:
        """Let Ctrl-C kill the process: its handler would only run once a call of the package returns.

        Called in the main thread. Does nothing if the program has its own handler.
        """
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler and before != self._on_interrupt:
            yield
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        saves = self._under_way()
        if saves:
            _abandon(saves)
        if not saves or _is_worker():
            signal.default_int_handler(number, frame)


def _is_worker() -> bool:
    """Whether this is a multiprocessing process, whose exit code only an exception changes."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _abandon(saves: "Sequence[SaveHandle]") -> None:
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # for users who do not want to wait for this either
    _core.end_by_interrupt()
    for save in saves:
        save.cancel()
    for save in saves:
        save._done.wait()
        if isinstance(save._error, Cancelled):
            say(f"{save._what} was abandoned because of the interrupt; {save._unchanged}")


def _report_later(saves: "Sequence[SaveHandle]", can_abandon: bool) -> None:
    deadline = time.monotonic() + _NOTICE_SECONDS
    for save in saves:
        save._done.wait(deadline - time.monotonic())
    left = [save for save in saves if not save.done()]
    with suppress(Exception):  # a message must not make a save fail
        _report_progress(left, can_abandon)


def _report_progress(left: "Sequence[SaveHandle]", can_abandon: bool) -> None:
    if left:
        hint = f"; Ctrl-C abandons {'it' if len(left) == 1 else 'them'}" if can_abandon else ""
        names = " and of ".join(_progress_of(save) for save in left[:_MAX_NAMED])
        more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
        say(f"finishing the save of {names}{more}{hint}")


def _progress_of(save: "SaveHandle") -> str:
    written, total = save.progress()
    if total == 0:
        return save._subject
    unit, name = (10**9, "GB") if total >= 10**9 else (10**6, "MB")
    return f"{save._subject} ({written / unit:.1f} of {total / unit:.1f} {name} written)"
