"""Copies steps to one tier in the background, one after the other."""

import _thread
import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from trunkline import _exit_hook
from trunkline._core import CheckpointStore, Engine
from trunkline._errors import Cancelled, Error, reword
from trunkline._logging import Log
from trunkline._tensor_io.at_exit import end_by_failure, say
from trunkline._tensor_io.background import start_thread
from trunkline._tensor_io.flag import Flag
from trunkline._trace import span
from trunkline.checkpoint.save import saves_into
from trunkline.checkpoint.tiers.copying import StepCopy
from trunkline.checkpoint.tiers.listing import committed_in, last_number_in
from trunkline.checkpoint.tiers.plan import Commit, held_steps, steps_to_copy
from trunkline.checkpoint.tiers.shard_copier import DamagedOriginalError
from trunkline.checkpoint.tiers.tier import Tier

_log = Log("checkpoint")

_NICENESS = 10  # of the thread that copies
_POLL_SECONDS = 0.1
_EXIT_SECONDS = 15.0  # for which the exit waits until copies have stopped


class DrainStatus(NamedTuple):
    """How far copying to a tier is.

    directory: of the tier. step: that is being copied; None: none is. done_bytes, total_bytes: of that step,
    written to the tier and then read back from it. waiting: steps that are to be copied after it. error: the
    last failure, None once a copy has succeeded after it.
    """

    directory: str
    step: int | None
    done_bytes: int
    total_bytes: int
    waiting: tuple[int, ...]
    error: BaseException | None


class NotNeededError(Exception):
    """The step that is copied is not to be copied any more."""


class Copy(Protocol):
    """One copy of one step, such as a StepCopy."""

    def progress(self) -> tuple[int, int]:
        """Return the bytes that were moved, and how many these will be."""

    def run(self, before_commit: Callable[[], None], keep: int | None) -> list[OSError]:
        """Make the copy, and remove all but the last `keep` ones; return what could not be removed."""


class Drain:
    """Copies the steps of one directory to one tier.

    request() lets a thread copy what is to be copied, until nothing is left, or a copy fails. No lock of
    Python code is held while another thread may need it, so that signal handlers may call everything here.
    """

    def __init__(
        self, tier: Tier, store: CheckpointStore, source: CheckpointStore, engine: Engine | None
    ) -> None:
        """`store`: of the tier; source: of the directory whose steps are copied."""
        self.tier = tier
        self.store = store
        self._source = source
        self._engine = engine
        self._before_commit: Callable[[], None] = lambda: None
        self._check_place: Callable[[], None] = lambda: None
        self._check_run: Callable[[], None] = lambda: None
        self._is_clean = False  # of what earlier processes have left
        self._directories = source.directory, tier.directory
        self._stop = Flag()
        self._numbers = itertools.count(1)
        self._requested = 0
        self._has_thread = _thread.allocate_lock()  # locked while a thread copies
        self._ended = Flag()  # set when that thread ends
        self._ended.set()
        self._queue: list[Commit] = []
        self._settled: set[Commit] = set()
        self._damaged: set[Commit] = set()  # that will never be copied
        self._raised: set[Commit] = set()  # whose failures were raised
        self._error: BaseException | None = None  # of the last copy
        self._news: tuple[Commit | None, BaseException] | None = None  # a failure that was not raised
        self._is_known_as_others = False  # an error has said that the tier is another run's
        self._copying: tuple[Commit, Copy] | None = None
        _drains.add(self)

    def connect(
        self,
        *,
        check_place: Callable[[], None],
        check_run: Callable[[], None],
        before_commit: Callable[[], None],
    ) -> None:
        """Set what raises an error if the tier is missing, or another run's, and what prepares a copy.

        before_commit: called with the tier locked, once it has its descriptor.
        """
        self._check_place, self._check_run, self._before_commit = check_place, check_run, before_commit

    def held(self) -> set[int]:
        """Return the steps that retention must leave for this tier."""
        source = self._source.directory
        return held_steps(committed_in(source, self.tier.every), self.tier.every, self._settled)

    def request(self) -> None:
        """Let a thread copy what is to be copied."""
        if _exit_hook.has_passed() or self._stop.is_set():
            return
        self._requested = next(self._numbers)
        _unfinished.add(self)
        if not self._has_thread.acquire(False):
            return  # its thread looks again before it ends
        try:
            self._ended = Flag()
            start_thread(self._run)
        except BaseException:
            self._has_thread.release()
            self._ended.set()
            raise

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no thread copies any more, for up to `timeout` seconds; return whether that is so."""
        return self._ended.wait(timeout)

    def stop(self) -> None:
        """End copying soon: what is not finished is removed again."""
        self._stop.set()

    def status(self) -> DrainStatus:
        """Return how far it is."""
        copying = self._copying
        waiting = tuple(each.step for each in self._queue if copying is None or each != copying[0])
        if copying is None:
            return DrainStatus(self.tier.directory, None, 0, 0, waiting, self._error)
        done, total = copying[1].progress()
        return DrainStatus(self.tier.directory, copying[0].step, done, total, waiting, self._error)

    def take_error(self) -> BaseException | None:
        """Return the error of a copy that has failed, once."""
        news, self._news = self._news, None
        self._forget_if_finished()
        if news is None:
            return None
        commit, error = news
        self._is_known_as_others |= isinstance(error, FileExistsError)
        if commit is not None:
            self._raised.add(commit)
        return error

    def take_error_at_exit(self) -> BaseException | None:
        """Return the error of a copy that has failed.

        None if another Checkpointer has made the copy since, or if it says again that the tier is another
        run's.
        """
        if self._news is None:
            return None
        commit, error = self._news
        is_known = self._is_known_as_others and isinstance(error, FileExistsError)
        if is_known or (commit is not None and commit.step not in self.left()):
            return None
        return self.take_error()

    def _forget_if_finished(self) -> None:
        if self._news is None and not self._queue and self._ended.is_set():
            _unfinished.discard(self)

    def raise_again(self) -> None:
        """Let take_error() return failures of the same steps again."""
        self._raised.clear()

    def _run(self) -> None:
        ended = self._ended
        with suppress(OSError):  # of this thread alone
            os.setpriority(os.PRIO_PROCESS, _thread.get_native_id(), _NICENESS)
        while True:
            seen = self._requested
            try:
                self._copy_all()
            except BaseException as error:
                self._fail(None, error)
            if self._requested == seen or self._stop.is_set():
                self._has_thread.release()
                if self._requested == seen or not self._has_thread.acquire(False):
                    ended.set()
                    self._forget_if_finished()
                    return
                if self._stop.is_set():
                    self._has_thread.release()
                    ended.set()
                    return

    def _copy_all(self) -> None:
        """Copy everything, while no other Checkpointer of this process copies to the tier."""
        turn = _turns.setdefault(os.path.realpath(self.tier.directory), _thread.allocate_lock())
        while not turn.acquire(timeout=_POLL_SECONDS):
            if self._stop.is_set():
                return
        try:
            while not self._stop.is_set():
                commit = self._next()
                if commit is None or not self._copy(commit):
                    return
        finally:
            turn.release()

    def look(self) -> None:
        """Find out what is to be copied."""
        local, queue = self._plan()
        self._settled = {each for each in local if each not in queue}
        self._queue = queue
        _settled_in[self._directories] = frozenset(self._settled)

    def _next(self) -> Commit | None:
        """Return what to copy next. Raises FileExistsError if the tier holds steps of another run."""
        try:
            self._check_run()
        except FileExistsError:
            self._queue = []
            self._settled = set(self._plan()[0])  # none waits for it
            _settled_in[self._directories] = frozenset(self._settled)
            raise
        self.look()
        return self._queue[0] if self._queue else None

    def _plan(self) -> tuple[list[Commit], list[Commit]]:
        """Return the steps of the directory that a tier gets, and what is to be copied of these."""
        local = committed_in(self._source.directory, self.tier.every)
        candidates = [each for each in local if each not in self._damaged]
        there = committed_in(self.tier.directory)
        above = 0 if there else last_number_in(self.tier.directory)
        return local, steps_to_copy(candidates, there, self.tier.every, self.tier.keep, above)

    def left(self) -> list[int]:
        """Return the steps that are still to be copied, as far as is known, if request() has been called.

        Reads the directory of the run alone: a tier that does not respond would block the caller in the
        kernel, where no signal ends that.
        """
        settled = _settled_in.get(self._directories)
        if self._requested == 0 or settled is None:
            return []
        with suppress(OSError):
            local = committed_in(self._source.directory, self.tier.every)
            candidates = [each for each in local if each not in settled]
            return [each.step for each in steps_to_copy(candidates, [], self.tier.every, self.tier.keep)]
        return []

    def to_copy(self) -> list[int]:
        """Return the steps that are still to be copied; none if that cannot be found out."""
        with suppress(OSError):
            return [each.step for each in self._plan()[1]]
        return []

    def _copy(self, commit: Commit) -> bool:
        """Copy one step; return whether to go on with the next."""
        began = time.monotonic()
        try:
            with span("checkpoint", "copy to a tier", f"step {commit.step} to {self.tier.directory}"):
                self._check_place()
                self._clean_up()
                copy = self._begin(commit)
                if copy is None:
                    return True
                self._copying = commit, copy
                problems = copy.run(self._before_commit, self.tier.keep)
        except Cancelled:
            if not self._stop.is_set():
                raise
            return False
        except NotNeededError:
            return True
        except DamagedOriginalError as error:
            if not self._is_gone(commit):
                self._damaged.add(commit)
                self._fail(commit, error.error)
            return True
        except Exception as error:
            self._settled = self._settled | set(self._queue)
            self._fail(commit, error)
            return False
        finally:
            self._copying = None
        self._settled = self._settled | {commit}
        _settled_in[self._directories] = _settled_in.get(self._directories, frozenset()) | {commit}
        self._error = None
        if self._news is not None and self._news[0] == commit:
            self._news = None  # it has failed before
        for problem in problems:
            _log.warn("while cleaning up %s: %s", self.tier.directory, problem)
        _log.info(
            "step %d is copied to %s: %.3g GB in %.1f s",
            *(commit.step, self.tier.directory, copy.progress()[1] / 2e9, time.monotonic() - began),
        )
        return True

    def _clean_up(self) -> None:
        """Remove what copies have left that were cut off, once: another process may have made them."""
        if self._is_clean:
            return
        self._is_clean = True
        for problem in self.store.collect_if_used()["problems"]:
            _log.warn("while cleaning up %s: %s", self.tier.directory, problem)

    def _begin(self, commit: Commit) -> Copy | None:
        """Open the step; None: it was removed or replaced meanwhile."""
        try:
            manifest = self._source.open_manifest(commit.step)
        except FileNotFoundError:
            return None
        if manifest.commit != commit.number:
            return None
        source = self._source.directory
        return StepCopy(
            manifest,
            self.store,
            run_directory=source,
            bytes_per_second=self.tier.bytes_per_second,
            engine=self._engine,
            stop=self._stop,
            is_saving=lambda: bool(saves_into(source)),
        )

    def _is_gone(self, commit: Commit) -> bool:
        return commit not in committed_in(self._source.directory, self.tier.every)

    def _fail(self, commit: Commit | None, error: BaseException) -> None:
        what = "copying" if commit is None else f"copying step {commit.step}"
        _log.warn("%s to %s failed: %s", what, self.tier.directory, error)
        self._error = _named(error, f"{what} to {self.tier.directory} failed")
        is_news = self._news is None or self._news[0] == commit  # the last error of a step counts
        if is_news and (commit is None or commit not in self._raised):
            self._news = commit, self._error

    def forget_parent(self) -> None:
        """In a forked child: the thread is the parent's, and so are the errors."""
        self._has_thread = _thread.allocate_lock()
        self._ended = Flag()
        self._ended.set()
        self._copying = self._error = self._news = None
        self._requested = 0


def raise_failures(drains: Sequence[Drain], more: str = "") -> None:
    """Raise the error of a copy that has failed, if it was not raised before. more: what to do."""
    for drain in drains:
        error = drain.take_error()
        if error is not None:
            if more and isinstance(error, Error):
                reword(error, f"{error}{more}")
            raise error


def _named(error: BaseException, what: str) -> BaseException:
    """Return an error of the same type whose text begins with `what`."""
    if not isinstance(error, Error):
        named = Error(getattr(error, "errno", None), f"{what}: {error}", getattr(error, "filename", None))
    else:
        named = type(error)(error.errno, f"{what}: {error}", error.filename)
        vars(named).update(vars(error))
    named.__cause__ = error
    return named


_drains: "weakref.WeakSet[Drain]" = weakref.WeakSet()
# Those that copy, have something left to copy, or an error that nobody has seen: the exit reports it even if
# their Checkpointers are gone.
_unfinished: set[Drain] = set()
_turns: dict[str, _thread.LockType] = {}  # by the real path of a tier: held by who copies to it
# By the directories of a run and of a tier, whichever Checkpointer copies: the steps of the run that the tier
# has or will never get, as was found out last. A copy that has failed is not among them.
_settled_in: dict[tuple[str, str], frozenset[Commit]] = {}


def _stop_all() -> None:
    """At exit: end what is being copied, and report failures, and what is left for the next Checkpointer."""
    drains = list(_drains)
    for drain in drains:
        drain.stop()
    deadline = time.monotonic() + _EXIT_SECONDS
    for drain in drains:
        if not drain.wait(max(0.0, deadline - time.monotonic())):
            say(f"gave up waiting for the copy to {drain.tier.directory}, which does not respond")
            end_by_failure()
    for drain in drains:
        error = drain.take_error_at_exit()
        if error is not None:
            say(str(error))
            end_by_failure()
    for directory in sorted({drain.tier.directory for drain in drains}):
        steps = sorted({s for drain in drains if drain.tier.directory == directory for s in drain.left()})
        if steps:
            say(
                f"not copied to {directory} yet: {'step' if len(steps) == 1 else 'steps'} "
                f"{', '.join(map(str, steps))}. The next run goes on with that; wait_drained() waits for it"
            )


def _forget_parent() -> None:
    _turns.clear()
    _unfinished.clear()
    _settled_in.clear()
    for drain in list(_drains):
        drain.forget_parent()


_exit_hook.call_at_exit(_stop_all)
os.register_at_fork(after_in_child=_forget_parent)
