"""Work that no signal handler interrupts."""

from collections.abc import Callable
from typing import TypeVar

from trunkline.checkpoint._background import start_thread
from trunkline.checkpoint._flag import Flag

T = TypeVar("T")


def run_in_own_thread(work: Callable[[], T]) -> T:
    """Call `work` in a thread made for it, and return or raise what it does.

    Python runs signal handlers in the main thread, between any two steps of it: one that raises, as that of
    Ctrl-C does, can keep a `with` block from putting back what it changed. In its own thread `work` is never
    cut short, and what it changes of a thread's settings goes with the thread. An exception of a handler
    leaves the wait for it; `work` then ends by itself.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []
    done = Flag()

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    start_thread(run, done)
    done.wait()
    value, error = outcome.pop()
    try:
        if error is not None:
            raise error
        return value  # type: ignore[return-value]
    finally:
        del error  # it refers to this frame
