"""Orders the saves of this process to one file: in the end it holds what the save called last wrote."""

import os
import threading

from trunkline._core import Engine
from trunkline._logging import Log
from trunkline._tensor_io.flag import Flag
from trunkline._tensor_io.sources import CheckedFileSet, SourceLayout
from trunkline._waits import Wait

_log = Log("checkpoint")


class OrderedFileSet(CheckedFileSet):
    """A FileSet of one file, which is written once the earlier saves of this file have ended.

    Earlier saves are those that entered before, by enter() or stage(). They have ended also if they failed or
    were cancelled. A save enters only once it runs in a thread that runs no signal handlers, and no lock is
    taken: so a handler that saves never waits for the call that it interrupted.
    """

    def __init__(
        self,
        layout: SourceLayout,
        *,
        engine: Engine | None = None,
        durable: bool = True,
        stage_all: bool = False,
        staging_bytes: "int | str | None" = None,
    ) -> None:
        """Create the file."""
        if stage_all:
            layout.sources.watch()
        super().__init__(
            [layout],
            layout.sources,
            f"saving {layout.path}",
            layout.path,
            engine=engine,
            durable=durable,
            stage_all=stage_all,
            staging_bytes=staging_bytes,
        )
        self._turn = _Turn(layout.path, in_background=stage_all)

    def enter(self) -> None:
        """Enter the order, before all saves that enter later; does nothing the second time."""
        self._turn.enter()

    def stage(self) -> None:
        """Wait for the earlier saves, then stage like FileSet."""
        self._turn.writer_thread = threading.get_ident()
        try:
            self._turn.enter()
            self._turn.wait_for_earlier()
            super().stage()
        except BaseException:
            self._turn.leave()
            raise

    def finish(self) -> None:
        """Do as FileSet does, and let the later saves go on."""
        try:
            super().finish()
        finally:
            self._turn.leave()

    def cancel(self) -> None:
        """Make stage() and finish() raise Cancelled soon, also while stage() waits."""
        super().cancel()
        self._turn.wake()

    def discard(self) -> None:
        """Do as FileSet does, and let the later saves go on."""
        try:
            super().discard()
        finally:
            self._turn.leave()


class _Turn:
    """One save's turn in the order of the saves of its file."""

    def __init__(self, path: str, in_background: bool) -> None:
        self.path = path
        self._file = _identity(path)
        self._in_background = in_background
        self.writer_thread: int | None = None  # known once it writes
        self._is_over = False
        self._is_awake = False
        self._waiting = Flag()
        self._later: list[Flag] = []

    def enter(self) -> None:
        _turns[self] = None  # keeps its place if it has entered before
        if self._is_over:  # checked after entering; leave() does both in the opposite order
            _turns.pop(self, None)

    def leave(self) -> None:
        self._is_over = True
        _turns.pop(self, None)
        for flag in self._later:
            flag.set()

    def wait_for_earlier(self) -> None:
        """Return once the earlier saves have ended, or after wake()."""
        for other in list(_turns):
            if other is self:
                break
            if other._file == self._file:
                self._waiting = Flag()
                other._later.append(self._waiting)
                if not other._is_over and not self._is_awake:  # else leave() or wake() may have missed it
                    self._wait_for(self._waiting)

    def wait(self) -> None:
        """Return once the save has ended."""
        flag = Flag()
        self._later.append(flag)
        if not self._is_over:  # else leave() may have missed it
            self._wait_for(flag)

    def _wait_for(self, flag: Flag) -> None:
        with Wait(_log, "wait for an earlier save", self.path) as wait:
            wait.until(flag.wait, lambda: f"an earlier save of this process to {self.path}")

    def writes(self, file: "tuple[object, ...]", folder: "tuple[object, ...]") -> bool:
        """Whether the save writes this file, or one in that folder."""
        return self._file == file or self._file[:-1] == folder

    def wake(self) -> None:
        self._is_awake = True
        self._waiting.set()


# In the order of enter(). Adding, removing and list() are one step of the interpreter each.
_turns: dict[_Turn, None] = {}

# In a forked child: the saves go on in the parent alone.
os.register_at_fork(after_in_child=_turns.clear)


def await_saves_of(path: str) -> None:
    """Wait for background saves of the file at `path`, or of files in the folder there.

    Does not wait for saves that this thread runs, as in exit handlers: a signal handler that loads may have
    interrupted them, and they would never end.
    """
    if not _turns:
        return
    file, folder = _identity(path), _directory_identity(os.path.realpath(path))
    for turn in list(_turns):
        is_of_another_thread = turn._in_background and turn.writer_thread != threading.get_ident()
        if is_of_another_thread and turn.writes(file, folder):
            turn.wait()


def _identity(path: str) -> tuple[object, ...]:
    """Return an identity that all paths of one file share; the file need not exist."""
    directory, name = os.path.split(os.path.realpath(path))
    return (*_directory_identity(directory), name)


def _directory_identity(directory: str) -> tuple[object, ...]:
    try:
        found = os.stat(directory)  # noqa: PTH116
    except OSError:
        return (directory,)
    return found.st_dev, found.st_ino
