"""Saves that are under way when the interpreter exits: they are finished, unless Ctrl-C abandons them."""

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

_PATIENCE_SECONDS = 1.0  # after that it is said what the exit waits for
_NAMED = 3  # saves in that message


def say(text: str) -> None:
    """Print a line to stderr, if anybody can be told."""
    if sys.stderr is not None:  # else print would take stdout
        with suppress(Exception):
            print(f"trunkline: {text}", file=sys.stderr, flush=True)


def end_by_failure() -> None:
    """Make the process exit with status 1, once the interpreter has ended, whatever its status would be.

    Called by an exit handler: all others, and the flush of stdout and stderr, still happen. The status is
    decided by then, and an os._exit here would skip the handlers that were registered earlier. So exit(1) is
    registered as a handler of the C library: called from there, it goes on with the handlers that are left.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(libc.exit, ctypes.c_void_p(1), None)


class ExitWatch:
    """What happens at the exit to saves, and to other work that the interpreter has to wait for.

    1. Before threads are joined, Ctrl-C gets another handler: KeyboardInterrupt would only end the joining,
       with exit code 0, and the save with the interpreter. Saves run in threads that nobody joins; a thread
       that is joined waits for them, and says what it waits for.
    2. When exit handlers run all saves are over. Where something ended the joining early they are waited for,
       also if signal handlers raise SystemExit. Then their errors are reported.
    3. The same once more when the handlers that were registered since the package was imported have run.
    4. What other handlers save is saved in the thread that calls (start_thread): nobody waits for others.
    """

    def __init__(self, unfinished: "dict[Flag, None]") -> None:
        """`unfinished`: flags of work that is not a save; each is set when it is over."""
        self._unfinished = unfinished
        self._under_way: Callable[[], list[SaveHandle]] = list
        self._report: Callable[[], bool] = lambda: False
        self._watched = 0  # the process of multiprocessing in which exit handlers are not relied on
        self._exiting = False
        self._interrupted = False

    def watch_saves(self, under_way: Callable[[], "list[SaveHandle]"], report: Callable[[], bool]) -> None:
        """`under_way`: returns the saves that are; `report`: called when none is, says whether one failed."""
        self._under_way = under_way
        self._report = report

    def register(self) -> None:
        """Have it called at the exit."""
        atexit.register(self._wait_and_report)
        _exit_hook.call_at_exit(self._wait_and_report)
        # No public function is called before threads are joined; concurrent.futures uses this one, too.
        early = getattr(threading, "_register_atexit", None)
        if early is not None:
            with suppress(RuntimeError):  # the exit has begun
                early(self._begin)

    def watch_child(self) -> None:
        """Where this is a process of multiprocessing: report there, too. Called when a save begins.

        Forked ones end by os._exit, without exit handlers.
        """
        process = sys.modules.get("multiprocessing.process")
        if process is None or process.parent_process() is None or self._watched == os.getpid():
            return
        self._watched = os.getpid()
        from multiprocessing import util

        # The last of all: what raises ends the others.
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
        """Once the exit has begun: have it wait for what is under way now."""
        if not self._exiting:
            return
        saves = self._under_way()
        if saves or self._unfinished:
            with suppress(RuntimeError):  # no thread to be had: step 2 waits
                threading.Thread(
                    target=self._wait_for, args=(saves, can_abandon), name="trunkline-exit", daemon=False
                ).start()

    def _wait_and_report(self) -> None:
        self._wait()
        self._report()

    def _wait(self) -> bool:
        """Return whether the saves were let finish."""
        saves = self._under_way()
        if saves or self._unfinished:
            with self._noting_interrupts():
                try:
                    self._wait_through_exits(saves)
                except BaseException:
                    # KeyboardInterrupt, or whatever else a signal handler raises. What the waiting itself
                    # could raise must not end a save: _tell_later suppresses it.
                    _abandon(saves)
                    return False
        return True

    def _wait_through_exits(self, saves: "Sequence[SaveHandle]") -> None:
        """Wait on where a signal handler ends the process (SystemExit): that is what it does already.

        A scheduler may repeat SIGTERM. The save that it is to leave time for is not abandoned by it, but by
        Ctrl-C, also where the handler of that raises SystemExit.
        """
        while True:
            with suppress(SystemExit):  # of a signal that comes between the inner ones
                while True:
                    with suppress(SystemExit):
                        if self._interrupted:
                            raise KeyboardInterrupt
                        self._wait_for(saves, self._take_interrupts())
                        return

    @contextmanager
    def _noting_interrupts(self) -> Iterator[None]:
        """Note that SIGINT came where a handler of the program's own gets it."""
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
        _tell_later(saves, can_abandon)
        for save in saves:
            save._done.wait()
        while flags := list(self._unfinished):
            for flag in flags:
                flag.wait()

    def _take_interrupts(self) -> bool:
        """Have Ctrl-C abandon saves from now on; return whether it does: a handler of the program's stays."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)
        return signal.getsignal(signal.SIGINT) == self._on_interrupt

    @contextmanager
    def interrupts_kill(self) -> Iterator[None]:
        """Have Ctrl-C kill the process: its handler would only run when a call of the package returns.

        Called in the main thread. A handler of the program's own stays.
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
    """Whether this process runs a multiprocessing.Process: an exception alone changes its exit code."""
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


def _tell_later(saves: "Sequence[SaveHandle]", can_abandon: bool) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for save in saves:
        save._done.wait(deadline - time.monotonic())
    left = [save for save in saves if not save.done()]
    with suppress(Exception):  # no message is worth a save
        _tell(left, can_abandon)


def _tell(left: "Sequence[SaveHandle]", can_abandon: bool) -> None:
    if left:
        hint = f"; Ctrl-C abandons {'it' if len(left) == 1 else 'them'}" if can_abandon else ""
        names = " and of ".join(_progress_of(save) for save in left[:_NAMED])
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        say(f"finishing the save of {names}{more}{hint}")


def _progress_of(save: "SaveHandle") -> str:
    written, total = save.progress()
    if total == 0:
        return save._subject
    unit, name = (10**9, "GB") if total >= 10**9 else (10**6, "MB")
    return f"{save._subject} ({written / unit:.1f} of {total / unit:.1f} {name} written)"
