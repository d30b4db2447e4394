"""Saving one file: trunkline.save and trunkline.save_async."""

import errno
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeAlias, cast

from trunkline._arguments import bool_argument, check_engine, check_staging_bytes, seconds_argument
from trunkline._core import Engine, FileSet, GcPause
from trunkline._errors import Cancelled, Error, RankError, Timeout, add_note, exception_of
from trunkline._exit_hook import check_threads_run, has_passed
from trunkline._formats.open_file import BinaryFile, check_binary, is_open_file
from trunkline._formats.suffixes import PT_SUFFIXES, SAFETENSORS_SUFFIX
from trunkline._logging import Log
from trunkline._paths import absolute_path, path_name
from trunkline._tensor_io.at_exit import end_by_failure, say
from trunkline._tensor_io.background import Claim, exit_watch, start_thread
from trunkline._tensor_io.flag import Flag
from trunkline._tensor_io.sources import SourceLayout
from trunkline._tensor_io.transfer import write_files
from trunkline._torch_or_numpy import require_torch
from trunkline._trace import span
from trunkline._types import Path
from trunkline._waits import Wait
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.save_order import OrderedFileSet

Format: TypeAlias = Literal["pt", "safetensors"]

_log = Log("checkpoint")


def save(
    obj: Any,
    path: "Path | BinaryFile",
    *,
    durable: bool = True,
    checksum: bool = True,
    engine: Engine | None = None,
    format: Format | None = None,  # noqa: A002 - the word for it
) -> None:
    """Write `obj` to `path`, in the format that its suffix names.

    .pt, .pth, .bin and .ckpt: as torch.save does. .safetensors: as safetensors.torch.save_file does.
    `format`, "pt" or "safetensors", names it for paths with other suffixes, or none, and for open files.

    `path` may also be a file that was opened for writing bytes, such as io.BytesIO. It is written from where
    it is, in the format of torch.save unless `format` says otherwise, and neither synced nor closed:
    `durable` has no effect, and what an error leaves there is incomplete. `checksum` then reads the tensors
    twice.

    Stock torch.load and safetensors read the files. `obj` is anything that torch.save supports, for
    .safetensors a mapping of names to tensors of torch, arrays of numpy, or both; arrays need no torch.
    Tensors may be on the CPU or on CUDA GPUs, whose current stream is waited for, and must not change
    meanwhile.

    The file appears complete under its name, at the end: if anything ends the save early (an error, Ctrl-C,
    a crash), an older file with that name is still there. `durable`: the file also survives a power failure
    once this returns (fsync of file and directory). `checksum`: a .safetensors file also carries a CRC-32C of
    each MiB, which load() verifies; a .pt file always has the CRC-32 of each storage.

    If one process saves to the same file several times, the file holds in the end what the save that was
    called last wrote: this waits for a save_async() to the same file that is still running.

    A RuntimeWarning names the parts of `obj` because of which load(), and torch.load with weights_only=True,
    will reject the file: objects of other classes.

    Raises ValueError for another suffix without `format`, a `format` that contradicts the suffix, a URL or a
    leading "~"; Unsupported for tensors that the file cannot hold, such as those whose storage was freed and,
    in .safetensors files, sparse, quantised and complex32 ones, and for .pt files without torch; TypeError
    for a .safetensors file of anything but tensors and arrays by name; for a .pt file also the errors of
    pickle (TypeError, PicklingError). Errors of the filesystem name the file by its absolute path, since the
    working directory may change meanwhile. If earlier save_async calls failed and their handles were dropped,
    this raises their errors, all in one, and
    saves nothing: call it again. Thread-safe.
    """
    if is_open_file(path):
        check_binary(path)
        check_engine(engine)
        _write_to(path, obj, bool_argument(checksum, "checksum"), _checked_format(format))
        return
    _check_order(path)
    check_threads_run(f"save {path_name(path)}")
    durable = bool_argument(durable, "durable")
    checksum = bool_argument(checksum, "checksum")
    check_engine(engine)
    raise_unobserved()
    with span("checkpoint", "save", path_name(path)):
        layout = lay_out(obj, cast("Path", path), checksum, format)
        write_files(OrderedFileSet(layout, engine=engine, durable=durable))


def _write_to(file: BinaryFile, obj: Any, checksum: bool, chosen: Format | None) -> None:
    name = str(getattr(file, "name", None) or f"a {type(file).__name__}")
    try:
        if chosen == "safetensors":
            from trunkline._formats import safetensors

            safetensors.write_to(file, obj, checksum=checksum)
            return
        require_torch("saving in the format of torch.save", 'pass format="safetensors" for arrays by name')
        from trunkline._formats import pt

        pt.write_to(file, obj, name)
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise exception_of(
            "system",
            error.errno or errno.EIO,
            f"cannot write all of it to {name}: {error.strerror or error}; what is there is incomplete",
            name,
        ) from error


def _checked_format(chosen: Any) -> Format | None:
    if chosen not in (None, "pt", "safetensors"):
        raise ValueError(f'format: must be "pt" or "safetensors", not {chosen!r}')
    checked: Format | None = chosen
    return checked


def save_async(
    obj: Any,
    path: Path,
    *,
    durable: bool = True,
    checksum: bool = True,
    staging_bytes: "int | str | None" = None,
    engine: Engine | None = None,
    format: Format | None = None,  # noqa: A002 - as save()
) -> "SaveHandle":
    """Begin to save `obj` as save() does, in the background, and return a handle to the save.

    `path` is that of a file: only save() writes to open files.

    The tensors are copied to staging memory and may change as soon as handle.wait_staged() returns; the rest
    of `obj` may change as soon as this function returns. If a tensor changes earlier, or its memory is
    resized or freed, the save fails; if memory is freed while it is read, the process may crash. Changes of a
    small part of a tensor, through `.data` or numpy, can go unnoticed, and the file is then a mixture of old
    and new values. A state larger than `staging_bytes` (None: half of the engine's pinned budget) is streamed
    through it: then staging takes as long as writing all but the last part. The file appears when
    handle.wait() would return.

    Saves to one file run one after the other, in the order of the calls: if an earlier one of this process is
    still running, staging begins when that one has ended, even if it failed or was cancelled.

    A handle may be dropped: the file is still written, also if the interpreter exits meanwhile, and the next
    save() or save_async() raises its error. If there is no next save, the error is printed at exit, and the
    exit status is 1. Ctrl-C during that exit abandons the save: the process reports it, and ends as if by
    SIGINT. In exit handlers that were registered before the package was imported, this returns when the file
    is saved, or raises the error, and the exit status is 1.

    Raises the errors of save() for its arguments and for `obj`, and ValueError for `staging_bytes`; the
    handle raises errors of the filesystem.
    """
    if is_open_file(path):
        raise TypeError(
            f"path: must be a path, not an open file ({type(path).__name__}): save() writes to those"
        )
    _check_order(path)
    check_threads_run(f"save {path_name(path)}")
    durable = bool_argument(durable, "durable")
    checksum = bool_argument(checksum, "checksum")
    check_staging_bytes(staging_bytes)
    check_engine(engine)
    raise_unobserved()
    with span("checkpoint", "begin a save in the background", path_name(path)):
        # No name for the layout here, so that its memory is freed once it is staged.
        return _begin_save(lay_out(obj, path, checksum, format), path, durable, staging_bytes, engine)


def _begin_save(
    layout: SourceLayout,
    path: Path,
    durable: bool,
    staging_bytes: "int | str | None",
    engine: Engine | None,
) -> "SaveHandle":
    files = OrderedFileSet(
        layout, engine=engine, durable=durable, stage_all=True, staging_bytes=staging_bytes
    )
    del layout
    try:
        name = path_name(path)
        handle = SaveHandle(name, f"{name} is as it was before", absolute_path(path))
        handle._start(FileJob(files))
    except BaseException:
        files.discard()
        raise
    files.enter()  # its thread runs, but may not have entered yet
    return handle


def _check_order(path: Any) -> None:
    """Raise TypeError for what is not a path, such as the object to save."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(
            f"path: must be str, bytes or os.PathLike, not {type(path).__name__}; the order is (obj, path)"
        )


def lay_out(obj: Any, path: Path, checksum: bool, chosen: Format | None = None) -> SourceLayout:
    """Describe the file to write, in the chosen format, or that of the suffix of `path`.

    Symbolic links to directories are resolved now: they may be changed before the file is written.
    """
    directory, file = os.path.split(absolute_path(path))
    name = os.path.join(os.path.realpath(directory), file)  # noqa: PTH118 - a Path would drop a trailing slash
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - a Path would make one of "" and "."
    named = {**dict.fromkeys(PT_SUFFIXES, "pt"), SAFETENSORS_SUFFIX: "safetensors"}.get(suffix)
    if _checked_format(chosen) not in (None, named) and named is not None:
        raise ValueError(
            f'format: is "{chosen}", but the suffix of {path_name(path)} names the format "{named}"'
        )
    if (chosen or named) == "pt":
        require_torch(
            f"{name}: saving a .pt file",
            "save arrays by name to a .safetensors file, or use a Checkpointer",
            name,
        )
        from trunkline._formats import pt

        with GcPause():
            return pt.lay_out(obj, name)
    if (chosen or named) == "safetensors":
        from trunkline._formats import safetensors

        with GcPause():
            return safetensors.lay_out(obj, name, checksum=checksum)
    if os.path.isdir(name):  # noqa: PTH112
        raise _is_directory(path_name(path))
    raise _unknown_suffix(path_name(path), suffix)


def _is_directory(name: str) -> Exception:
    file = os.path.join(name, "model.safetensors")  # noqa: PTH118
    return exception_of(
        "system", errno.EISDIR, f"path: {name} is a directory; name a file, such as {file}", name
    )


def _unknown_suffix(name: str, suffix: str) -> Exception:
    known = ", ".join((*PT_SUFFIXES, SAFETENSORS_SUFFIX))
    what = f"has the unknown suffix {suffix}" if suffix else "has no suffix"
    return ValueError(
        f"path: {name} {what}; the suffix chooses the format: use one of {known}, or pass "
        'format="pt" or format="safetensors"'
    )


class Job(Protocol):
    """What a SaveHandle does in the background."""

    def begin(self) -> FileSet:
        """Create the files."""

    def commit(self) -> float | None:
        """Make them valid; called when they are written, durable and have their names.

        Returns which share of the data they hold, where the rest was saved earlier; None if they hold all.
        """

    def cancel(self) -> None:
        """Make begin() and commit() raise Cancelled soon if they wait for other ranks. Thread-safe."""

    def abandon(self, error: BaseException) -> BaseException:
        """Undo begin(); called instead of commit(), or when that failed.

        Returns the error to raise: `error`, or its cause.
        """


class FileJob:
    """Files that are valid as soon as they have their names."""

    def __init__(self, files: FileSet) -> None:
        """`files`: not staged yet."""
        self._files: FileSet | None = files

    def begin(self) -> FileSet:
        """Return the files."""
        files, self._files = self._files, None
        assert files is not None
        return files

    def commit(self) -> None:
        """Do nothing."""

    def cancel(self) -> None:
        """Do nothing: it never waits for other ranks."""

    def abandon(self, error: BaseException) -> BaseException:
        """Do nothing: a FileSet that failed has removed them."""
        return error


class SaveHandle:
    """A save that runs in the background; thread-safe.

    Made by save_async and by Checkpointer.save.
    """

    def __init__(
        self, subject: str, unchanged: str, in_errors: str, owner: object = None, directory: str = ""
    ) -> None:
        """Not for users: save_async and Checkpointer.save make handles.

        For messages: subject: what is saved; unchanged: what a cancelled save leaves unchanged; in_errors:
        the subject with its absolute path. owner: the Checkpointer, which alone raises the error of the save;
        directory: that of the owner. _start() must follow.
        """
        self._subject = subject
        self._what = f"saving {subject}"
        self._in_errors = f"saving {in_errors}: "
        self._unchanged = unchanged
        self._owner = None if owner is None else weakref.ref(owner)
        self._directory = directory
        self._files: FileSet | None = None
        self._cancelled = False
        self._interrupted = False  # cancelled because a wait for it was interrupted, not by its user
        self._starter = threading.get_ident()  # the thread whose tensors it copies
        self._started = False  # by _start()
        self._claim = Claim()  # taken by its thread, or by _start(), which then abandons the save
        # No lock: a signal handler that waits for the save may have interrupted code that holds the lock,
        # which the thread of the save would then wait for.
        self._job: Job | None = None
        self._staged = Flag()
        self._done = Flag()
        self._error: BaseException | None = None
        self._observed = False
        self._last_progress = (0, 0)
        self._share: float | None = None

    def _start(self, job: Job) -> None:
        """Begin `job`. If this raises (Ctrl-C, no thread can be started) the save is over, and undone."""
        try:
            self._started = True
            self._job = job
            _under_way[self] = None
            exit_watch.watch_child()
            has_run_here = start_thread(self._run, Flag())
            if has_run_here and self._error is not None:
                end_by_failure()
                raise self._error
            exit_watch.keep()
        except BaseException as error:
            if self._claim.take():
                interrupted = f"{self._what}: interrupted before it began; {self._unchanged}"
                self._error = error if isinstance(error, Exception) else Cancelled(None, interrupted)
                job.abandon(error)
                self._end()
            else:
                self.cancel()
                if has_passed():  # it ran in this thread, where a signal handler may have ended it anywhere
                    self._end()
                self._done.wait()
            self._observed = True
            raise

    def _run(self) -> None:
        if not self._claim.take():
            return
        try:
            with span("checkpoint", "save in the background", self._subject):
                self._run_job()
        finally:
            if self._files is not None:
                self._last_progress = self._files.progress()
            self._end()

    def _run_job(self) -> None:
        job = self._job
        assert job is not None
        files = None
        try:
            if self._cancelled:  # maybe before _job was set
                job.cancel()
            files = job.begin()
            self._files = files
            if self._cancelled:  # checked after _files is set; cancel() does both in the opposite order
                files.cancel()
            files.stage()
            self._staged.set()
            files.finish()
            with span("checkpoint", "commit the save", self._subject):
                self._share = job.commit()
        except BaseException as error:
            # A user who cancels a save need not wait for it, also if another rank cancelled it first.
            by_user = self._cancelled and not self._interrupted
            self._observed = by_user and isinstance(error, Cancelled | RankError)
            self._error = error
            with suppress(BaseException):
                self._error = job.abandon(error)
                _log.info("%s failed: %s", self._what, self._error)
            if isinstance(self._error, Cancelled):
                why = self._why()
                text = self._in_errors.removesuffix(": ") + " was cancelled"
                if self._interrupted:
                    text += ": a wait for it was interrupted before its tensors were copied"
                self._error = Cancelled(None, text if why == _CANCELLED else f"{self._in_errors}{why}")
            _failed.append(self)  # before _end(): an exit in between would report nothing
        finally:
            files = job = None  # an error's traceback would keep them alive

    def _end(self) -> None:
        self._files = self._job = None
        _under_way.pop(self, None)
        self._done.set()
        self._staged.set()

    def staged(self) -> bool:
        """Return whether the tensors may change again. Never blocks; True also after an error."""
        return self._staged.is_set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the tensors may change again.

        Raises the save's error if it has failed, Timeout after `timeout` seconds. After Ctrl-C the tensors
        are still copied, for up to ten seconds; then, or at another Ctrl-C, the save is cancelled, and wait()
        and the exit report that.
        """
        self._wait(self._staged, timeout)

    def done(self) -> bool:
        """Return whether the save has ended: saved, or failed. Never blocks."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the file is saved, and durable unless it is saved with durable=False.

        Raises the save's error each time it is called; Timeout after `timeout` seconds: the save goes on.
        Ctrl-C ends the wait, not the save, unless tensors are still to be copied: see wait_staged().
        """
        self._wait(self._done, timeout)

    def _join(self) -> None:
        """Wait until the save has ended, without raising its error or marking it as observed.

        An interrupt may cancel the save, as in wait().
        """
        self._wait_for(self._done, None)

    def _wait_for(self, flag: Flag, timeout: float | None) -> bool:
        try:
            with Wait(_log, "wait for a save", self._subject) as wait:
                return wait.until(flag.wait, lambda: f"the save of {self._subject}{self._step()}", timeout)
        except SystemExit:
            raise  # the exit waits for it
        except BaseException as error:
            if not self._stage_or_cancel():
                add_note(error, f"{self._what} was cancelled: its tensors were not copied yet")
            raise

    def _step(self) -> str:
        """Say how far it is, for a log record."""
        done, total = self.progress()
        what = "its bytes are being written" if self._staged.is_set() else "its tensors are being copied"
        return f" ({what}: {done} of {total})"

    def _stage_or_cancel(self) -> bool:
        """Wait until the tensors are copied, or cancel the save, after a wait for it was interrupted.

        Code that runs after an interrupt may change the tensors, as when a notebook cell is run again after
        Ctrl-C. A save that another thread started goes on. Returns whether the save goes on.
        """
        if self._staged.is_set() or self._cancelled or threading.get_ident() != self._starter:
            return True
        second = None
        try:
            if self._staged.wait(_NOTICE_SECONDS):
                return True
            say(f"{self._what}: waiting until the tensors are copied; Ctrl-C again cancels the save")
            if self._staged.wait(_STAGING_SECONDS):
                return True
        except SystemExit:
            raise  # the exit waits for it
        except KeyboardInterrupt:
            pass  # the caller raises the first interrupt
        except BaseException as error:
            second = error
        self._interrupted = True
        self.cancel()
        self._done.wait()
        if second is not None:
            raise second
        return not self._was_interrupted()

    def cancel(self) -> None:
        """Cancel the save unless it is almost over: what was written is removed, and wait() raises Cancelled.

        This is not a failure: the next save does not raise it. If several ranks save together, the others
        fail with an error that names this one. A rank that is cancelled after it has written its share cannot
        know whether rank 0 still commits the checkpoint.
        """
        self._cancelled = True
        job, files = self._job, self._files
        if job is not None:
            job.cancel()
        if files is not None:
            files.cancel()

    def _was_cancelled(self) -> bool:
        """Whether the save was ended by cancel(), here or on another rank, not by a failure."""
        ended = isinstance(self._error, Cancelled) or getattr(self._error, "is_cancellation", False)
        return self._cancelled and not self._interrupted and ended

    def _was_interrupted(self) -> bool:
        """Whether the save was cancelled because a wait for it was interrupted."""
        return self._interrupted and isinstance(self._error, Cancelled)

    def progress(self) -> tuple[int, int]:
        """Return the bytes written so far, and the bytes to write in total."""
        files = self._files
        return files.progress() if files is not None else self._last_progress

    def written_share(self) -> float | None:
        """Return which share of the state's bytes was written, 0.0 to 1.0: the rest had not changed.

        Of all ranks together. None until the save is over, and without Checkpointer(..., incremental=True).
        """
        return self._share

    def _wait_for_end(self) -> None:
        self._done.wait()

    def _wait_or_cancel(self) -> None:
        """Wait; when a signal handler ends the wait (Ctrl-C), the save is cancelled and cleaned up first."""
        try:
            self._wait_for_end()
        except BaseException:
            self.cancel()
            self._done.wait()
            self._observed = True
            raise
        self.wait()

    def _forget_parent(self) -> None:
        """In a forked child: the save goes on in the parent alone."""
        self._files = self._job = None
        self._error = Error(
            None, f"{self._what}: runs in the process that this one was forked from; wait for it there"
        )
        self._observed = True
        self._staged.set()
        self._done.set()

    def _wait(self, flag: Flag, timeout: float | None) -> None:
        if not self._wait_for(flag, None if timeout is None else seconds_argument(timeout)):
            raise Timeout(
                None, f"{self._what}: not finished after {timeout} s; the save continues, wait again"
            )
        if self._error is not None:
            self._observed = True
            raise self._error

    def _why(self) -> str:
        """Return why it failed, in words that can follow `_what`."""
        return (
            str(self._error)
            .removeprefix(self._in_errors)
            .removeprefix(self._in_errors.removesuffix(": ") + " ")
        )

    def __repr__(self) -> str:
        if self._done.is_set():
            state = "saved"
            if self._error is not None:
                state = "cancelled" if self._was_cancelled() else "failed"
        else:
            state = "writing" if self._staged.is_set() else "staging"
        return f"<trunkline.SaveHandle {self._what}: {state}>"


_NOTICE_SECONDS = 1.0  # after Ctrl-C, until a message says that a wait goes on
_STAGING_SECONDS = 9.0  # how long the wait then goes on

_CANCELLED = "writing was cancelled"  # of src/tensor_file/file_writer.cpp

# Adding, removing and list() are atomic in the interpreter, as in _tensor_io/background.py.
_under_way: dict[SaveHandle, None] = {}
_failed: list[SaveHandle] = []  # whose errors may not have been observed
_MAX_NAMED = 10  # saves that an error names, besides the first


def saves_into(directory: str) -> list[tuple[SaveHandle, object]]:
    """Return the running saves of Checkpointers of `directory`, with their owners (None: deleted)."""
    into = os.path.realpath(directory)
    return [
        (handle, None if handle._owner is None else handle._owner())
        for handle in list(_under_way)
        if handle._directory and os.path.realpath(handle._directory) == into
    ]


def _take_unobserved(is_wanted: Callable[[SaveHandle], bool]) -> list[SaveHandle]:
    """Remove the saves with unobserved errors from _failed; each is returned to one caller."""
    taken = []
    for handle in list(_failed):
        if handle._observed or is_wanted(handle):
            with suppress(ValueError):  # another thread, or a signal handler, took it
                _failed.remove(handle)
                if not handle._observed:
                    taken.append(handle)
    return taken


def take_failures(owner: object = None, directory: str = "") -> tuple[str, BaseException | None]:
    """Return a message about all failed saves that nobody waited for, and the error of the first of them.

    With a Checkpointer as `owner`: its own saves, and those of deleted Checkpointers of its directory.
    Without: saves of files, and of deleted Checkpointers. Only a Checkpointer itself raises the errors of its
    saves: if another save raised one, that save would fail for no reason, and the Checkpointer would not
    know.
    """

    def is_wanted(handle: SaveHandle) -> bool:
        if handle._owner is None:
            return owner is None
        theirs = handle._owner()
        if theirs is None:
            return owner is None or handle._directory == directory
        return theirs is owner

    # All at once: each error makes its caller's save fail, and the caller may retry only once.
    handles = _take_unobserved(is_wanted)
    for handle in handles:
        if handle._was_interrupted():
            handle._observed = True
            warn_without_failing(f"{handle._what}: {handle._why()}", caller())
    handles = [handle for handle in handles if not handle._was_interrupted()]
    if not handles:
        return "", None
    for handle in handles:
        handle._observed = True
    first, *others = handles
    text = "an earlier save failed, and nobody waited for it"
    if others:
        text = f"{len(handles)} earlier saves failed, and nobody waited for them"
    text = f"{text}: {first._what}: {first._why()}"
    if others:
        named = ", ".join(handle._what for handle in others[:_MAX_NAMED])
        more = f", and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
        text += f"; the others: {named}{more}"
    return text, first._error


def raise_unobserved(owner: object = None, directory: str = "") -> None:
    """Raise one error for all that take_failures() finds."""
    text, error = take_failures(owner, directory)
    if error is not None:
        text += "; this call saved nothing: call it again"
        raise Error(getattr(error, "errno", None), text, getattr(error, "filename", None)) from error


def _report_at_exit() -> bool:
    failed = _take_unobserved(lambda _: True)
    for handle in failed:
        say(f"{handle._what} failed: {handle._why()}")
    if failed:  # the parent process must not take this for a success
        end_by_failure()
    return bool(failed)


def _forget_parent() -> None:
    _failed.clear()  # the parent reports them
    for handle in list(_under_way):
        handle._forget_parent()
    _under_way.clear()


exit_watch.watch_saves(lambda: list(_under_way), _report_at_exit)
os.register_at_fork(after_in_child=_forget_parent)
