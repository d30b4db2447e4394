"""Saves of this process to one file: the file ends as the save that was called last wrote it."""

import os
import threading

from trunkline._core import Engine
from trunkline._tensor_io.flag import Flag
from trunkline._tensor_io.sources import CheckedFileSet, SourceLayout


class OrderedFileSet(CheckedFileSet):
    """A FileSet of one file, which writes when the earlier saves of this file are over.

    Earlier saves are those that entered before, by enter() or stage(). They are over also when they failed or
    were cancelled. A save enters only once a thread that runs no signal handlers carries it out, and no lock
    is taken: a handler that saves never waits for the call that it has interrupted.
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
        """Come before all saves that enter later; does nothing the second time."""
        self._turn.enter()

    def stage(self) -> None:
        """Wait for the earlier saves, then do as FileSet does."""
        self._turn.carried_out_by = threading.get_ident()
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
        """Make stage(), which may be waiting, and finish() raise Cancelled soon."""
        super().cancel()
        self._turn.wake()

    def discard(self) -> None:
        """Do as FileSet does, and let the later saves go on."""
        try:
            super().discard()
        finally:
            self._turn.leave()


class _Turn:
    """The turn of one save in the order of those of its file."""

    def __init__(self, path: str, in_background: bool) -> None:
        self._file = _identity(path)
        self._in_background = in_background
        self.carried_out_by: int | None = None  # a thread, once it does
        self._is_over = False
        self._is_awake = False
        self._waiting = Flag()
        self._later: list[Flag] = []

    def enter(self) -> None:
        _turns[self] = None  # stays where it is, if it is there
        if self._is_over:  # looked at after entering; leave() does it the other way round
            _turns.pop(self, None)

    def leave(self) -> None:
        self._is_over = True
        _turns.pop(self, None)
        for flag in self._later:
            flag.set()

    def wait_for_earlier(self) -> None:
        """Return when they are over, or at wake()."""
        for other in list(_turns):
            if other is self:
                break
            if other._file == self._file:
                self._waiting = Flag()
                other._later.append(self._waiting)
                if not other._is_over and not self._is_awake:  # else leave() or wake() may have missed it
                    self._waiting.wait()

    def wait(self) -> None:
        """Return when it is over."""
        flag = Flag()
        self._later.append(flag)
        if not self._is_over:  # else leave() may have missed it
            flag.wait()

    def writes(self, file: "tuple[object, ...]", folder: "tuple[object, ...]") -> bool:
        """Whether it writes this file, or one in that folder."""
        return self._file == file or self._file[:-1] == folder

    def wake(self) -> None:
        self._is_awake = True
        self._waiting.set()


# In the order of enter(). Adding, removing and list() are one step of the interpreter each.
_turns: dict[_Turn, None] = {}

# In a forked child: the saves go on in the parent alone.
os.register_at_fork(after_in_child=_turns.clear)


def await_saves_of(path: str) -> None:
    """Wait for the saves in the background of the file, or of files in the folder, at `path`.

    Not for saves of this thread, as in exit handlers: a signal handler that loads may have interrupted them,
    and they would never end.
    """
    if not _turns:
        return
    file, folder = _identity(path), _directory_identity(os.path.realpath(path))
    for turn in list(_turns):
        is_elsewhere = turn._in_background and turn.carried_out_by != threading.get_ident()
        if is_elsewhere and turn.writes(file, folder):
            turn.wait()


def _identity(path: str) -> tuple[object, ...]:
    """Return what is the same for all paths of one file, which need not exist."""
    directory, name = os.path.split(os.path.realpath(path))
    return (*_directory_identity(directory), name)


def _directory_identity(directory: str) -> tuple[object, ...]:
    try:
        found = os.stat(directory)  # noqa: PTH116
    except OSError:
        return (directory,)
    return found.st_dev, found.st_ino
