"""Threads that a signal handler can start and wait for at any moment.

Thread.start() and Thread.join() acquire locks of the threading module in Python code. A signal handler that
runs at that moment, and starts a thread itself or waits for one that is being started, waits forever: the
code that it interrupted holds the lock. Starting a thread through _thread needs no lock. Code in such a
thread must not call threading.current_thread(), which acquires one; so does Thread(...) without `daemon`.
"""

import _thread
import os
from collections.abc import Callable
from contextlib import nullcontext

from trunkline import _exit_hook
from trunkline._tensor_io.at_exit import ExitWatch
from trunkline._tensor_io.flag import Flag

# Flags of work that the interpreter waits for before it exits; each is set when the work has ended. A dict:
# adding, removing and list() are atomic in the interpreter, so no lock is needed.
unfinished: dict[Flag, None] = {}

exit_watch = ExitWatch(unfinished)
exit_watch.register()
os.register_at_fork(after_in_child=unfinished.clear)  # the threads are the parent's


def start_thread(run: Callable[[], object], done: Flag | None = None) -> bool:
    """Run `run`, which must not raise, in a new thread. Raises RuntimeError if no thread can be started.

    With `done` the interpreter does not exit before `run` has returned, which sets the flag. Once the exit no
    longer waits for threads, `run` runs in this thread. Returns whether it has run here.
    """
    _exit_hook.check_threads_run("start a thread")
    if done is None:
        _thread.start_new_thread(run, ())
        return False
    if _exit_hook.has_passed():
        with exit_watch.interrupts_kill() if _exit_hook.on_main_thread() else nullcontext():
            try:
                run()
            finally:
                done.set()
        return True

    claim = Claim()

    def run_to_the_end() -> None:
        if not claim.take():
            return
        try:
            run()
        finally:
            unfinished.pop(done, None)
            done.set()

    try:
        unfinished[done] = None
        _thread.start_new_thread(run_to_the_end, ())
    except BaseException:  # maybe from a signal handler, when the thread already runs
        if claim.take():
            unfinished.pop(done, None)
        raise
    return False


class Claim:
    """Can be taken once: by the first of two threads that tries."""

    def __init__(self) -> None:
        """Not taken yet."""
        self._lock = _thread.allocate_lock()

    def take(self) -> bool:
        """Take it, and return whether this call did. Never blocks."""
        return self._lock.acquire(False)
