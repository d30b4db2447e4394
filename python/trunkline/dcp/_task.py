"""Calls of a Checkpointer that run in a thread of their own, where no signal handler interrupts them."""

import os
from collections.abc import Callable
from typing import Any

import torch

from trunkline import _exit_hook
from trunkline._core import FileSet
from trunkline._errors import Cancelled
from trunkline._tensor_io.background import Claim, start_thread
from trunkline._tensor_io.flag import Flag
from trunkline.checkpoint.save import SaveHandle
from trunkline.dcp import running_saves


class Cancellation:
    """Lets another thread end a save that has not committed."""

    def __init__(self) -> None:
        """Nothing is cancelled yet."""
        self.is_requested = False
        self._files: FileSet | SaveHandle | None = None

    def request(self) -> None:
        """End the save soon. Once it commits, this has no effect."""
        self.is_requested = True
        files = self._files
        if files is not None:
            files.cancel()

    def check(self) -> None:
        """Raise Cancelled if that was requested."""
        if self.is_requested:
            raise Cancelled(None, "the save was interrupted before its checkpoint was complete")

    def watch(self, files: FileSet | SaveHandle | None) -> None:
        """Cancel these files, or this save, as well; None: none any more."""
        self._files = files
        if files is not None and self.is_requested:  # request() does both in the opposite order
            files.cancel()


class Task:
    """Something that is done as a whole, whatever interrupts the wait for it.

    A signal handler runs in the main thread, and may raise between any two steps there (Ctrl-C). What locks a
    directory, commits, and notes what it has committed, therefore runs in another thread.

    1. The Checkpointer refers to the task before it starts.
    2. The thread takes the claim, and does everything else.
    3. If start() is interrupted, either the thread runs, or it never will: then the next wait() takes the
       claim, and the task counts as cancelled.
    """

    def __init__(self, act: "Callable[[Task], None]") -> None:
        """`act`: called in the thread. It calls has_begun() once the caller need not wait any longer."""
        self._act: Callable[[Task], None] | None = act
        self.future = running_saves.SaveFuture()
        self.cancellation = Cancellation()
        self._claim = Claim()
        self._is_started = False
        self._process = os.getpid()
        self._begun = Flag()
        self._ended = Flag()
        self._thread_ended = Flag()  # the interpreter waits for it before it exits
        self._streams = _current_streams()
        self.has_begun = False
        self.runs_here = False

    def start(self) -> None:
        """Run it. Once the exit no longer waits for threads, it runs in this one."""
        self.runs_here = _exit_hook.has_passed()
        start_thread(self._run, self._thread_ended)
        self._is_started = True

    def begin(self) -> None:
        """Let wait_until_begun() return."""
        self.has_begun = True
        self._begun.set()

    def wait_until_begun(self) -> None:
        """Wait until the task says that it has begun, or has ended."""
        self._begun.wait()

    def wait(self) -> None:
        """Wait until it has ended. Raises no error of the task."""
        if self._process != os.getpid():  # it goes on in the parent
            return
        if not self._is_started and self._claim.take():
            self._act = None
            self.cancellation.request()
            self._end(Cancelled(None, "interrupted before it began"))
        self._ended.wait()

    def take_error(self) -> BaseException | None:
        """Return the error of a task that has ended, unless it was cancelled."""
        if self._process != os.getpid():
            return None
        error = self.future.exception()
        return None if self._was_cancelled(error) else error

    def _was_cancelled(self, error: BaseException | None) -> bool:
        return isinstance(error, Cancelled) and self.cancellation.is_requested

    def _run(self) -> None:
        if not self._claim.take():
            return
        act, self._act = self._act, None
        error: BaseException | None = None
        try:
            for stream in self._streams:
                torch.cuda.set_stream(stream)
            assert act is not None
            act(self)
        except BaseException as failed:
            error = failed
        del act  # so that the state is freed before the task has ended
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.future.end(error)
        running_saves.end(self.future, failed=error is not None)
        if self._was_cancelled(error):
            running_saves.see(self.future)  # who has cancelled it knows
        self._begun.set()
        self._ended.set()


def _current_streams() -> list[Any]:
    """Return the current stream of each GPU, the current GPU's last; each thread has its own."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    current = torch.cuda.current_device()
    others = [device for device in range(torch.cuda.device_count()) if device != current]
    return [torch.cuda.current_stream(device) for device in (*others, current)]
