"""Threads that a signal handler can start and wait for, whatever the main thread was doing.

Thread.start() and Thread.join() take locks of the threading module in Python code. A signal handler that
runs just then, and itself starts a thread or waits for one that is being started, waits forever: the code
that it interrupted holds the lock. Starting a thread through _thread takes no lock. What runs in such a
thread must not call threading.current_thread(), which does take one; so does Thread(...) without `daemon`.
"""

import _thread
import os
from collections.abc import Callable
from contextlib import nullcontext

from trunkline import _exit_hook
from trunkline._tensor_io.at_exit import ExitWatch
from trunkline._tensor_io.flag import Flag

# Set when work is over that the interpreter has to wait for before it exits. A dict: adding, removing and
# list() are one step of the interpreter each, so that no lock is needed.
unfinished: dict[Flag, None] = {}

exit_watch = ExitWatch(unfinished)
exit_watch.register()
os.register_at_fork(after_in_child=unfinished.clear)  # the threads are the parent's


def start_thread(run: Callable[[], object], done: Flag | None = None) -> bool:
    """Run `run`, which must not raise, in a new thread. Raises RuntimeError when no thread can be had.

    With `done` the interpreter does not exit before `run` has returned; then the flag is set. Where the exit
    waits for nothing any more, it runs in this thread, and has returned if this returns true.
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
    except BaseException:  # also of a signal handler, once the thread runs
        if claim.take():
            unfinished.pop(done, None)
        raise
    return False


class Claim:
    """What only one of two threads gets: the one that asks first."""

    def __init__(self) -> None:
        """Not taken yet."""
        self._lock = _thread.allocate_lock()

    def take(self) -> bool:
        """Take it, and return whether that worked. Never blocks."""
        return self._lock.acquire(False)
